"""Element-wise operators: they run on the local parts, and the layout of the result is known.

Element i of each result depends on element i of each argument only, so nothing is communicated
where all give each rank the same elements.
Ragged arguments that are split differently are redistributed first: to the layout of what is
written, else of the first of them; those of another shape are gathered. File `operands` says what
else may stand beside them. Lists (``foreach``, ``fused``) are matched position by position, and a
position without a ragged tensor goes to torch's own dispatch. A write to a tensor that all ranks
have (a state of ``grad.new_zeros(rows, 1)``) gathers the ragged arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp import compat
from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.ragged.access import Access, access_of
from vescale_fsdp.ragged.gathered import may_differ, run_gathered, run_in_place, whole
from vescale_fsdp.ragged.operands import (
    CutDifferentlyError,
    Operands,
    broadcasts_to,
    is_tensor_list,
)
from vescale_fsdp.ragged.recuts import respecified_as
from vescale_fsdp.ragged.replicated import as_replicated, is_unsharded
from vescale_fsdp.ragged.tensor import RaggedTensor, distribute_tensor, wrap_local
from vescale_fsdp.ranks import collectives

aten = torch.ops.aten


def run_pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an element-wise operator on the local parts and wrap what comes out.

    Raises:
        ValueError: the arguments do not mix.
        NotImplementedError: an argument is partial, and the operator is not linear.
    """
    access = access_of(func)
    # It describes the global tensor, and means nothing for a flat local part.
    kwargs.pop("memory_format", None)
    written = access.written(args, kwargs)
    try:
        operands = Operands(func, access, args, kwargs, is_ragged=True)
    except CutDifferentlyError:  # known before anything is sent, on all ranks
        shards = [each for each in (*args, *kwargs.values()) if isinstance(each, RaggedTensor)]
        are_alike = len({each.shape for each in shards}) == 1  # but partial, or on other meshes
        is_enlarged = any(each.shape != _shape_of(args) for each in written)
        if access.has_lists or are_alike or is_enlarged:
            raise
        return _run_beside_whole(func, args, kwargs)
    if operands.single is None:
        positions = list(operands.positions)
        for arg in written:  # to tensors that all ranks have
            if is_tensor_list(arg) and not operands.is_alike(arg):
                pairs = zip(arg, positions, strict=True)
                positions = [None if _is_outside(item) else spec for item, spec in pairs]
        if any(spec is None for spec in positions):
            return _split(func, access, args, kwargs, positions)
    elif not written:
        if any(_enlarges(arg, operands.single) for arg in args):
            return run_gathered(func, *args, **kwargs)
    elif all(_is_outside(each, operands.single) for each in written):
        with torch.no_grad():  # autograd has been here
            return run_gathered(func, *args, is_checked=False, **kwargs)
    operands.check(args, kwargs)
    out = kwargs.get("out")
    if isinstance(out, torch.Tensor) and out.shape != _shape_of(args):  # torch would give it this
        raise ValueError(
            f"{func} would change the shape of a RaggedTensor from {tuple(out.shape)} to "
            f"{tuple(_shape_of(args))}: `out` has to have the shape of the result"
        )
    local_args = [operands.local(arg) for arg in args]
    local_kwargs = {key: operands.local(value) for key, value in kwargs.items()}
    if not written:
        return operands.wrap(func(*local_args, **local_kwargs))
    # The version of each local tensor that is written to is raised: the engine reads it. Below
    # autograd torch does not raise it. What shares memory by a view, by ``detach()`` or by
    # ``.data`` shares the version, too.
    for each in access.written(local_args, local_kwargs)[: access.num_counted]:
        increment = (each,) if isinstance(each, torch.Tensor) else each
        torch.autograd.graph.increment_version(increment)
    if isinstance(out, torch.Tensor) and not any(isinstance(arg, RaggedTensor) for arg in args):
        # ``torch.mul(x, y, out=ragged)`` of two numbers: torch would give a part without elements
        # the shape of the numbers.
        local = local_kwargs["out"]
        number = func(*local_args, **{**local_kwargs, "out": local.new_empty(0)})
        local.copy_(number.expand_as(local))
    else:
        func(*local_args, **local_kwargs)
    return access.returned(args, kwargs)


def _enlarges(arg: Any, spec: DTensorSpec) -> bool:
    """Whether the result has more elements than the ragged arguments, because of this one."""
    return _is_outside(arg) and arg.numel() > 1 and not broadcasts_to(arg.shape, spec.shape)


def _is_outside(tensor: Any, spec: DTensorSpec | None = None) -> bool:
    """Whether all ranks have a tensor; or it is plain, and takes the single element of ``spec``."""
    if not isinstance(tensor, DTensor):
        takes_number = spec is not None and math.prod(spec.shape) == 1
        return takes_number and isinstance(tensor, torch.Tensor)
    return not isinstance(tensor, RaggedTensor) and is_unsharded(tensor)


def _shape_of(args: Sequence[Any]) -> torch.Size:
    """The shape of the result of an element-wise operator."""
    shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
    return torch.Size(torch.broadcast_shapes(*shapes))


def _run_beside_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on ragged tensors of several shapes: smaller ones are gathered.

    Where the result is larger than each of them (a column times a row), all are.
    """
    kept = _shape_of(args)
    operands = (*args, *kwargs.values())
    if not any(isinstance(arg, RaggedTensor) and arg.shape == kept for arg in operands):
        return run_gathered(func, *args, **kwargs)

    def beside(arg: Any) -> Any:
        is_smaller = isinstance(arg, RaggedTensor) and arg.shape != kept
        return whole(func, arg) if is_smaller else arg

    others = {key: beside(value) for key, value in kwargs.items()}
    return run_pointwise(func, *map(beside, args), **others)


def _split(
    func: Any,
    access: Access,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: Sequence[DTensorSpec | None],
) -> Any:
    """Run a list operator apart for positions with ragged tensors, DTensors and plain tensors."""
    ragged = [i for i, spec in enumerate(positions) if spec is not None]
    others = [i for i, spec in enumerate(positions) if spec is None]
    lists = [arg for arg in (*args, *kwargs.values()) if is_tensor_list(arg)]
    # torch refuses lists that mix plain tensors and DTensors.
    are_dtensors = [i for i in others if any(isinstance(arg[i], DTensor) for arg in lists)]
    are_plain = [i for i in others if i not in set(are_dtensors)]

    def at(arg: Any, indices: list[int]) -> Any:
        is_list = isinstance(arg, list | tuple) and len(arg) == len(positions)
        return [arg[i] for i in indices] if is_list else arg

    merged: list[Any] = [None] * len(positions)
    for indices in (ragged, are_dtensors, are_plain):
        if not indices:
            continue
        part_args = tuple(at(arg, indices) for arg in args)
        part_kwargs = {key: at(value, indices) for key, value in kwargs.items()}
        if indices is ragged:
            results = run_pointwise(func, *part_args, **part_kwargs)
        else:
            with torch.no_grad():  # autograd has been here
                results = run_gathered(func, *part_args, is_checked=False, **part_kwargs)
        for i, result in zip(indices, results or (), strict=False):
            merged[i] = result
    return access.returned(args, kwargs) if access.writes else merged


# --- operators that need a word of their own ------------------------------------------------------


def new(func: Any, x: RaggedTensor, size: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """``x.new_zeros(x.shape)`` and the like, which autograd calls: like ``zeros_like(x)``.

    Of another shape it is a replicated DTensor, as of any DTensor: there is no layout for it.
    """
    local = x._local_tensor
    if tuple(size) != tuple(x.shape):
        made = func(local, size, *args, **kwargs)
        replicated = [Replicate()] * x.device_mesh.ndim
        return as_replicated(DTensor.from_local(made, x.device_mesh, replicated, run_check=False))
    if func is aten.new_empty_strided.default:  # a ragged tensor is always row-major
        args = ((1,), *args[1:])
    made = func(local, local.shape, *args, **kwargs)
    return wrap_local(made, respecified_as(x._spec, dtype=made.dtype), False)


def copy(func: Any, x: Any, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Copies between ragged and plain tensors: both are collective.

    ``plain.copy_(ragged)``: the whole, gathered, because nothing of ``plain`` is left.
    ``ragged.copy_(plain)``: the first rank's values, as of ``distribute_tensor``, which sends each
    rank its part. So ranks do not differ, whatever their ``plain`` has.
    """
    is_followed = torch.is_grad_enabled() and source.requires_grad
    if not isinstance(x, DTensor) and not is_followed:
        return func(x, compat.local_tensor(whole(func, source)), *args, **kwargs)
    if isinstance(source, DTensor) or is_followed or source.numel() == 1:
        return run_pointwise(func, x, source, *args, **kwargs)
    if compat.local_tensor(x).is_meta:
        return x
    values = distribute_tensor(source.detach().expand(x.shape), x.device_mesh, x.placements)
    return run_pointwise(func, x, values, *args, **kwargs)


def masked_fill(func: Any, x: Any, mask: torch.Tensor, value: Any) -> Any:
    """``x[mask] = number`` since torch 2.15. A plain mask is that of the first rank."""
    if isinstance(x, RaggedTensor) and may_differ(mask):
        mask = distribute_tensor(mask.detach().expand(x.shape), x.device_mesh, x.placements)
    return run_pointwise(func, x, mask, value)


def index_put(
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
        return run_pointwise(aten.copy_.default, x, number) if mask.numel() else x
    is_mask = isinstance(mask, RaggedTensor) and mask.dtype == torch.bool and mask.shape == x.shape
    if not is_mask or values.numel() != 1 or accumulate:
        return run_in_place(func, x, indices, values, accumulate)
    return run_pointwise(aten.masked_fill_.Tensor, x, mask, number.view(()))


def unscale(
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
