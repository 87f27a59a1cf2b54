"""Which operators run on ragged tensors, how, and what comes out: the table of operators.

| kind | operators | result |
|---|---|---|
| pointwise | tag ``pointwise``, ``_foreach_*``, ``_fused_*``, copies, ``*_like`` | ragged |
| reduction, each slice on one rank | ``sum``, ``mean``, ``amax``, ``any``, norms ... | ragged |
| sums elsewhere | ``sum``, ``mean``, ``count_nonzero``, norms of finite order | partial |
| extremes elsewhere | ``max``, ``amax``, ``any``, ``all``, infinite norms | combined at once |
| view | ``view``, ``squeeze``, ``x[a:b]``, ``split``, ``expand`` ... | ragged |
| other views | ``x.T``, ``x[:, 1]`` | gathered when it is read or written to |
| random | ``normal_``, ``rand_like``, dropout ... | ragged, the numbers of one process |
| memory | ``is_pinned()`` | that of this rank's part, without communication |
| number | ``item()``, ``float()``, ``bool()`` of one element | that of the whole, on every rank |
| gather | all else with new results: ``mm``, ``cat``, ``var`` ... | of the whole: an all-gather |
| write | ``triu_``, ``cumsum_`` ... | in place; of the whole each rank stores its part |
| shapes in place | ``t_``, ``squeeze_`` ..., no parameter | ``x`` becomes the view |
| refuse | collectives of ``torch.distributed`` | error, before anything is sent |
| refuse | other random operators, ``resize_`` | error that names ``full_tensor()`` |

Copies are pointwise, and more: ``plain.copy_(x)`` is the whole, an all-gather; ``x.copy_(plain)``,
``x[i] = plain`` and a plain mask are those of the first rank.

Other operands may be ragged tensors with any shards, numbers, one-element plain tensors and
replicated DTensors (file `operands`). A ragged tensor that is ``Partial`` along another axis takes
linear operators only. Gradients have the layout of their tensors (file `gradients`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from vescale_fsdp.compat import pytree
from vescale_fsdp.ragged import pointwise, random, reductions, views
from vescale_fsdp.ragged.access import access_of
from vescale_fsdp.ragged.base import FSDPTensor, note_operands
from vescale_fsdp.ragged.collectives import is_collective, refuse_collective
from vescale_fsdp.ragged.gathered import (
    GatheredView,
    gathered_view,
    run_gathered,
    run_in_place,
    run_on_views,
    turn_in_place,
)
from vescale_fsdp.ragged.recuts import respecified_as
from vescale_fsdp.ragged.replicated import number
from vescale_fsdp.ragged.tensor import RaggedTensor
from vescale_fsdp.ragged.whole import has_size_of, run_on_whole

aten = torch.ops.aten


class Rule(NamedTuple):
    """How an operator runs on ragged tensors."""

    run: Callable[..., Any]  # (operator, its arguments)
    way: str  # of an element-wise operator: see `dispatch`


def _refuse(func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    leaves = pytree.tree_leaves((args, kwargs))
    refuse_collective(func, next(each for each in leaves if isinstance(each, RaggedTensor)))


def _other_view(func: Any, x: RaggedTensor, *args: Any, **kwargs: Any) -> GatheredView:
    return gathered_view(func, x, lambda whole: func(whole, *args, **kwargs))


# Operators of which the schema does not say how they run, or that need a word of their own.
_TABLE: dict[str, dict[Any, Callable[..., Any]]] = {
    "pointwise": {
        # not tagged so by torch
        **dict.fromkeys(
            (
                aten.clone.default,
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
            ),
            pointwise.run_pointwise,
        ),
        aten.copy_.default: pointwise.copy,
        aten.index_put_.default: pointwise.index_put,
        aten.masked_fill_.Scalar: pointwise.masked_fill,
        aten.masked_fill_.Tensor: pointwise.masked_fill,
        aten.new_empty.default: pointwise.new,
        aten.new_empty_strided.default: pointwise.new,
        aten.new_full.default: pointwise.new,
        aten.new_ones.default: pointwise.new,
        aten.new_zeros.default: pointwise.new,
        aten._amp_foreach_non_finite_check_and_unscale_.default: pointwise.unscale,
    },
    "reduction": {
        **dict.fromkeys(reductions.KINDS, reductions.run_reduction),
        aten.allclose.default: reductions.equal,
        aten.equal.default: reductions.equal,
        aten.is_same_size.default: lambda func, x, other: has_size_of(x, other),
        aten.prod.default: reductions.product,
        aten.prod.dim_int: reductions.product,
        aten._foreach_norm.Scalar: reductions.run_norms,
    },
    "view": {
        **dict.fromkeys(
            (
                aten._reshape_alias.default,
                aten._unsafe_view.default,
                aten.permute.default,
                aten.select.int,
                aten.slice.Tensor,
                aten.split.Tensor,
                aten.split_with_sizes.default,
                aten.squeeze.default,
                aten.squeeze.dim,
                aten.squeeze.dims,
                aten.t.default,
                aten.transpose.int,
                aten.unbind.int,
                aten.unsqueeze.default,
                aten.view.default,
            ),
            views.view,
        ),
        aten.alias.default: views.alias,
        aten.detach.default: views.alias,
        aten.expand.default: views.expand,
        # the gradients of views
        aten.cat.default: views.join,
        aten.select_backward.default: views.select_backward,
        aten.slice_backward.default: views.slice_backward,
        aten.stack.default: views.join,
    },
    "random": random.RANDOM,
    "memory": {  # a question about this rank's
        aten.is_pinned.default: lambda func, x, *args: func(x._local_tensor, *args),
    },
    "number": {
        aten._local_scalar_dense.default: lambda func, x: number(x),
        aten.item.default: lambda func, x: number(x),
    },
}
_FOREACH_REDUCTIONS = ("_foreach_max", "_foreach_norm", "_foreach_powsum")
_RULES: dict[Any, Rule] = {}  # those of the table, and what has run since


def rule_of(func: Any) -> Rule:
    """How an operator runs on ragged tensors: what the table says, else what its schema does."""
    rule = _RULES.get(func)
    if rule is None:
        run = _derived(func)
        rule = _RULES[func] = Rule(run, _way_of(func, run))
    return rule


def _derived(func: Any) -> Callable[..., Any]:
    """What runs an operator that is not in the table."""
    access = access_of(func)
    if is_collective(func):
        return _refuse
    if _is_pointwise(func):
        return pointwise.run_pointwise
    if torch.Tag.inplace_view in func.tags:
        return turn_in_place
    if access.is_local and not access.writes:
        if not access.is_view:
            return run_gathered
        if [str(each.type) for each in func._schema.returns] == ["Tensor"]:
            return _other_view
    return run_in_place


def _is_pointwise(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if torch.Tag.pointwise in func.tags:
        return True
    if name.startswith("_foreach_"):
        return name not in _FOREACH_REDUCTIONS
    if name.startswith(("_fused_adagrad", "_fused_adam", "_fused_sgd")):
        return True
    # An in-place operator, which torch does not tag, that writes what a pointwise one gives.
    if not name.endswith("_") or name.endswith("__"):
        return False
    functional = getattr(getattr(aten, name[:-1], None), func._overloadname, None)
    return functional is not None and torch.Tag.pointwise in functional.tags


_NUMBERS = {float, int, bool}
_LONG, _WRITES, _MAKES = "long", "writes", "makes"


def _way_of(func: Any, run: Callable[..., Any]) -> str:
    """Whether an element-wise operator of single tensors writes to its first, or makes a tensor."""
    access = access_of(func)
    is_of_one = not (access.has_lists or access.has_out) and access.num_returns == 1
    if run not in (pointwise.run_pointwise, pointwise.copy) or not is_of_one or access.is_view:
        return _LONG
    if access.writes:
        return _WRITES if [place for place, _ in access.positions] == [0] else _LONG
    return _MAKES if str(func._schema.returns[0].type) == "Tensor" else _LONG


for _operators in _TABLE.values():
    for _func, _run in _operators.items():
        _RULES[_func] = Rule(_run, _way_of(_func, _run))


def dispatch(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func``, which has one of our tensors among its arguments.

    Raises:
        NotImplementedError: the operator cannot run on shards, or not yet.
        ValueError: the arguments do not mix.
    """
    if GatheredView in types:
        return run_on_views(func, args, kwargs)
    if RaggedTensor not in types:
        return run_on_whole(func, types, args, kwargs)
    rule = _RULES.get(func) or rule_of(func)
    # The short way of ``p.add_(g, alpha=-lr)`` and the like, which optimizers call for each tensor:
    # all are ragged with one spec, or numbers, and so the local parts go together as they are.
    if rule.way is not _LONG and {*map(type, kwargs.values())} <= _NUMBERS:
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
                if rule.way is _WRITES:
                    torch.autograd.graph.increment_version(locals_[:1])
                    func(*locals_, **kwargs)
                    return args[0]
                result = func(*locals_, **kwargs)
                meta = spec.tensor_meta
                assert meta is not None, "specs of ragged tensors are made with their meta"
                if result.dtype != meta.dtype:
                    spec = respecified_as(spec, dtype=result.dtype)
                return RaggedTensor.__new__(RaggedTensor, result, spec, requires_grad=False)
    try:
        return rule.run(func, *args, **kwargs)
    except (NotImplementedError, ValueError) as error:
        note_operands(error, pytree.tree_leaves((args, kwargs)))
        raise


FSDPTensor.run_operator = staticmethod(dispatch)
