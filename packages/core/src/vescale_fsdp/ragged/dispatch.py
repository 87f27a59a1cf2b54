"""Which operators run on ragged tensors, and what comes out.

| kind | operators | result |
|---|---|---|
| element-wise | tag ``pointwise``, ``_foreach_*``, ``_fused_*``, copies, ``*_like`` | ragged |
| parts and shapes | ``view``, ``squeeze``, ``x[a:b]``, ``split``, ``expand`` ... | ragged |
| random | ``normal_``, ``uniform_``, ``rand_like``, ``bernoulli``, dropout ... | ragged |
| reduction, each slice on one rank | ``sum``, ``mean``, ``amax``, ``any``, norms ... | ragged |
| sums elsewhere | ``sum``, ``mean``, ``prod``, ``count_nonzero``, finite norms | DTensor, partial |
| extremes elsewhere | ``max``, ``amax``, ``any``, ``all``, infinite norms | DTensor, replicated |
| writes to a mask | ``x[mask] = number`` | in place |
| copies to plain tensors | ``plain.copy_(x)`` | the whole: an all-gather |
| copies of plain tensors | ``x.copy_(plain)``, ``x[i] = plain`` | the values of the first rank |
| unscaling | what ``torch.amp.GradScaler`` calls | in place; all ranks find the same |
| comparison | ``torch.equal`` | ``bool``, the same on every rank |
| numbers | ``item()``, ``float()``, ``bool()`` of one element | that of the whole, on every rank |
| all else that returns new tensors | ``mm``, ``cat``, ``sort`` ... | of the whole: an all-gather |
| other views | ``x.T``, ``x[:, 1]`` | gathered when it is read or written to |
| other writes | ``triu_``, ``cumsum_`` ... | in place; of the whole each rank stores its part |
| shapes in place | ``t_``, ``squeeze_`` ..., no parameter | ``x`` becomes the view |
| collectives of ``torch.distributed`` | ``all_reduce`` ... | error, before anything is sent |
| other random operators, ``resize_`` | | error that names ``full_tensor()`` |

Other operands may be ragged tensors with any shards, numbers, one-element plain tensors and
replicated DTensors (file `mixing`). A ragged tensor that is ``Partial`` along another axis takes
linear operators only. Gradients have the layout of their tensors (file `mixing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat
from vescale_fsdp.compat import pytree
from vescale_fsdp.ragged.aggregates import AGGREGATES
from vescale_fsdp.ragged.assignment import note_operands
from vescale_fsdp.ragged.collectives import is_collective, refuse_collective
from vescale_fsdp.ragged.elementwise import run_elementwise, run_new
from vescale_fsdp.ragged.gathered import (
    gathered_view,
    is_functional,
    is_view,
    may_differ,
    run_gathered,
    run_in_place,
    turn_in_place,
    whole,
)
from vescale_fsdp.ragged.random import RANDOM
from vescale_fsdp.ragged.recuts import respecified_as
from vescale_fsdp.ragged.reduced import number
from vescale_fsdp.ragged.tensor import RaggedTensor, distribute_tensor
from vescale_fsdp.ragged.views import VIEWS
from vescale_fsdp.ragged.whole import access_of, has_size_of, tell_of_writes
from vescale_fsdp.ranks import collectives

aten = torch.ops.aten


def _unscale(
    func: Any, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """What ``GradScaler`` calls: multiply gradients in place, and set ``found_inf`` for all.

    Cost: one all-reduce of one element for each axis over which gradients are cut.
    """
    parts = [compat.local_tensor(grad).detach() for grad in grads]
    func(parts, found_inf, inv_scale)
    torch.autograd.graph.increment_version(map(compat.local_tensor, grads))
    axes = {
        (grad.device_mesh, axis): None
        for grad in grads
        if isinstance(grad, DTensor)
        for axis, placement in enumerate(grad.placements)
        if not placement.is_replicate() and grad.device_mesh.size(axis) > 1
    }
    for mesh, axis in axes:
        group = collectives.mesh_group(mesh, axis)
        collectives.all_reduce(found_inf, group, dist.ReduceOp.MAX).wait()


def _index_put(
    func: Any,
    x: RaggedTensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> Any:
    """``x[mask] = number``, on shards; ``x[places] = values`` is written to the whole."""
    mask, number = indices[0] if len(indices) == 1 else None, values.reshape(-1)[:1]
    if mask is not None and x.shape == (1,) and not isinstance(mask, DTensor):
        # What torch makes of a mask without dimensions: places in ``x.view(1)``, one or none.
        return run_elementwise(aten.copy_.default, (x, number), {}) if mask.numel() else x
    is_mask = isinstance(mask, RaggedTensor) and mask.dtype == torch.bool and mask.shape == x.shape
    if not is_mask or values.numel() != 1 or accumulate:
        return run_in_place(func, (x, indices, values, accumulate), {})
    return run_elementwise(aten.masked_fill_.Tensor, (x, mask, number.view(())), {})


def _copy(func: Any, x: Any, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Copies between ragged and plain tensors: both are collective.

    ``plain.copy_(ragged)``: the whole, gathered, because nothing of ``plain`` is left.
    ``ragged.copy_(plain)``: the first rank's values, as of ``distribute_tensor``, which sends each
    rank its part. So ranks do not differ, whatever their ``plain`` has.
    """
    is_followed = torch.is_grad_enabled() and source.requires_grad
    if not isinstance(x, DTensor) and not is_followed:
        return func(x, compat.local_tensor(whole(func, source)), *args, **kwargs)
    if isinstance(source, DTensor) or is_followed or source.numel() == 1:
        return run_elementwise(func, (x, source, *args), kwargs)
    if compat.local_tensor(x).is_meta:
        return x
    values = distribute_tensor(source.detach().expand(x.shape), x.device_mesh, x.placements)
    return run_elementwise(func, (x, values, *args), kwargs)


def _masked_fill(func: Any, x: Any, mask: torch.Tensor, value: Any) -> Any:
    """``x[mask] = number`` since torch 2.15. A plain mask is that of the first rank."""
    if isinstance(x, RaggedTensor) and may_differ(mask):
        mask = distribute_tensor(mask.detach().expand(x.shape), x.device_mesh, x.placements)
    return run_elementwise(func, (x, mask, value), {})


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten._local_scalar_dense.default: lambda _, x: number(x),
    aten.index_put_.default: _index_put,
    aten.is_same_size.default: lambda _, x, other: has_size_of(x, other),
    aten.item.default: lambda _, x: number(x),
    aten.masked_fill_.Scalar: _masked_fill,
    aten.masked_fill_.Tensor: _masked_fill,
    aten.new_empty.default: run_new,
    aten.new_empty_strided.default: run_new,
    aten.new_full.default: run_new,
    aten.new_ones.default: run_new,
    aten.new_zeros.default: run_new,
    **AGGREGATES,
    **RANDOM,
    **VIEWS,
}

# Element-wise operators that torch does not tag as pointwise.
_ELEMENTWISE = {
    aten.clone.default,
    aten.copy_.default,
    aten.detach_.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.full_like.default,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    aten.lerp_.Scalar,
    aten.lerp_.Tensor,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.ones_like.default,
    aten.rsub.Scalar,
    aten.rsub.Tensor,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._to_copy.default,
}
_FOREACH_REDUCTIONS = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func``, which has a ragged tensor among its arguments.

    Raises:
        NotImplementedError: the operator cannot run on shards, or not yet.
        ValueError: the arguments do not mix.
    """
    # The short way of ``p.add_(g, alpha=-lr)`` and the like, which optimizers call for each tensor:
    # all are ragged with one spec, or numbers, and so the local parts go together as they are.
    way = _WAYS.get(func)
    if way is None:
        way = _WAYS[func] = _way_of(func)
    if way is not _LONG and {*map(type, kwargs.values())} <= _NUMBERS:
        spec, locals_ = None, []
        for arg in args:
            if type(arg) is RaggedTensor and (spec is None or arg._spec is spec):
                spec = arg._spec
                locals_.append(arg._local_tensor)
            elif type(arg) in _NUMBERS:
                locals_.append(arg)
            else:
                break
        else:
            if spec is not None and len(spec.placements) == 1:
                if way is _WRITES:
                    torch.autograd.graph.increment_version(locals_[:1])
                    func(*locals_, **kwargs)
                    return args[0]
                result = func(*locals_, **kwargs)
                meta = spec.tensor_meta
                assert meta is not None, "specs of ragged tensors are made with their meta"
                if result.dtype != meta.dtype:
                    spec = respecified_as(spec, dtype=result.dtype)
                return RaggedTensor.__new__(RaggedTensor, result, spec, requires_grad=False)
    handler = _HANDLERS.get(func)
    try:
        if handler is not None:
            return handler(func, *args, **kwargs)
        if _is_elementwise(func):
            return run_elementwise(func, args, kwargs)
        if is_collective(func):
            operands = pytree.tree_leaves((args, kwargs))
            refuse_collective(func, next(x for x in operands if isinstance(x, RaggedTensor)))
        if torch.Tag.inplace_view in func.tags:
            return turn_in_place(func, *args)
        if is_functional(func):
            return run_gathered(func, args, kwargs)
        if is_view(func):
            return gathered_view(func, *args, **kwargs)
        return run_in_place(func, args, kwargs)
    except (NotImplementedError, ValueError) as error:
        note_operands(error, pytree.tree_leaves((args, kwargs)))
        raise


_NUMBERS = {float, int, bool}
_LONG, _WRITES, _MAKES = "long", "writes", "makes"
_WAYS: dict[Any, str] = {}  # by operator


def _way_of(func: Any) -> str:
    """Whether an element-wise operator of single tensors writes to its first, or makes a tensor."""
    access = access_of(func)
    is_special = func in _HANDLERS and func is not aten.copy_.default
    is_of_one = not (access.has_lists or access.has_out) and access.num_returns == 1
    if is_special or not is_of_one or access.is_view or not _is_elementwise(func):
        return _LONG
    if access.writes:
        return _WRITES if [place for place, _ in access.positions] == [0] else _LONG
    return _MAKES if str(func._schema.returns[0].type) == "Tensor" else _LONG


@cache
def _is_elementwise(func: Any) -> bool:
    if func in _ELEMENTWISE:
        return True
    name = func._schema.name.removeprefix("aten::")
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if torch.Tag.pointwise in func.tags:
        return True
    if func._schema.name.startswith("aten::_foreach_"):
        return func._schema.name not in _FOREACH_REDUCTIONS
    if name.startswith(("_fused_adagrad", "_fused_adam", "_fused_sgd")):
        return True
    return name.endswith("_") and not name.endswith("__") and _has_pointwise_form(func, name[:-1])


def _has_pointwise_form(func: Any, name: str) -> bool:
    """Whether an in-place operator, which torch does not tag, writes what a pointwise one gives."""
    packet = getattr(aten, name, None)
    functional = getattr(packet, func._overloadname, None)
    return functional is not None and torch.Tag.pointwise in functional.tags


def dispatch_and_tell(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`dispatch`, for those who want to hear of writes."""
    result = dispatch(func, args, kwargs)
    tell_of_writes(func, args, kwargs)
    return result


RaggedTensor.run_operator = staticmethod(dispatch)
RaggedTensor.run_and_tell = staticmethod(dispatch_and_tell)
