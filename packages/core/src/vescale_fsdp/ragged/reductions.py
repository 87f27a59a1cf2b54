"""Sums, means, extremes and norms of ragged tensors, over all or some dimensions.

| what is reduced | result |
|---|---|
| whole slices of leading dimensions that stay, each on one rank | ragged, no communication |
| anything else: sum, mean, ``count_nonzero``, norms of finite order | ``Partial`` |
| anything else: max, min, any, all, norms of infinite order | ``Replicate`` |

A ``Partial`` result is reduced at its first use (``full_tensor()``, ``item()``, the next
operator that is not linear), so sums of many tensors can share one all-reduce. What becomes a
number of Python is the global one, on every rank. Where results are partial and some dimensions
stay, each rank adds its boxes into a result of full shape; parts without elements contribute the
neutral element. A p-norm of the whole is the p-norm of the p-norms of its parts: the result is
partial in that sense (`compat.NormPartial`).

Extremes are reduced at once, by one all-reduce of the result per sharding axis: the maximum of
gloo and of NCCL loses a NaN, so NaN are sent beside the values, which a ``Partial("max")`` could
not do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.compat import DTensorSpec, NormPartial
from vescale_fsdp.ragged.gathered import run_gathered
from vescale_fsdp.ragged.gradients import keep_layout
from vescale_fsdp.ragged.operands import local_beside, refuse_partial, start_move
from vescale_fsdp.ragged.recuts import (
    held_here,
    range_here,
    rescaled,
    respecified_as,
    sizes_here,
)
from vescale_fsdp.ragged.replicated import wrap_replicated
from vescale_fsdp.ragged.tensor import RaggedTensor, wrap_local
from vescale_fsdp.ranks import collectives

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_SUM = Partial("sum")
_Dims = int | Sequence[int] | None


class Kind(NamedTuple):
    """One way to reduce, apart from the dimensions."""

    # (a part, dimensions, dtype of the result) -> the part without these dimensions
    local: Callable[[torch.Tensor, list[int], torch.dtype], torch.Tensor]
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of two results
    neutral: float | int | bool  # what a part without elements contributes
    dtype: torch.dtype  # of the result
    across: Placement | str  # how ranks are combined: a Partial, or "max" or "min" at once


# --- how each operator reduces --------------------------------------------------------------------


def _sum(func: Any, x: RaggedTensor, *over: Any, dtype: torch.dtype | None = None) -> Kind:
    def local(part: torch.Tensor, dims: list[int], wanted: torch.dtype) -> torch.Tensor:
        return torch.sum(part, dims, dtype=wanted)

    return Kind(local, torch.add, 0, dtype or (x.dtype if _has_fractions(x) else torch.int64), _SUM)


def _mean(
    func: Any, x: RaggedTensor, dims: _Dims = None, *_: Any, dtype: torch.dtype | None = None
) -> Kind:
    """The local sums divided by the global number of elements: means of parts do not add up."""
    result = dtype or x.dtype
    if not (result.is_floating_point or result.is_complex):
        raise RuntimeError(f"{func}: the mean of {result} is not defined; pass a dtype of numbers")
    count = math.prod(x.shape[d] for d in _dims(x, dims))

    def local(part: torch.Tensor, dims: list[int], wanted: torch.dtype) -> torch.Tensor:
        # A sum in half precision overflows where the mean does not.
        working = torch.float32 if wanted in _HALF else wanted
        return (torch.sum(part, dims, dtype=working) / count).to(wanted)

    # The mean of nothing is not a number.
    return Kind(local, torch.add, 0.0 if count else math.nan, result, _SUM)


def _count_nonzero(func: Any, x: RaggedTensor, *_: Any) -> Kind:
    def local(part: torch.Tensor, dims: list[int], wanted: torch.dtype) -> torch.Tensor:
        return torch.count_nonzero(part, dims).to(wanted)

    return Kind(local, torch.add, 0, torch.int64, _SUM)


def _extreme(which: str, func: Any, x: RaggedTensor, dims: _Dims = None, *_: Any) -> Kind:
    """``max`` and ``min`` of all elements, ``amax`` and ``amin`` over some dimensions."""
    if any(x.shape[d] == 0 for d in _dims(x, dims)):
        error = IndexError if dims else RuntimeError  # as torch has it
        raise error(
            f"{func}: an empty tensor has no {which}; got {tuple(x.shape)}, dimensions {dims}"
        )
    low: float
    high: float
    if x.dtype == torch.bool:
        low, high = False, True
    elif x.dtype.is_floating_point:
        low, high = -math.inf, math.inf
    else:
        low, high = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
    extreme, join, neutral = (
        (torch.amax, torch.maximum, low) if which == "max" else (torch.amin, torch.minimum, high)
    )
    return Kind(lambda part, over, to: extreme(part, over).to(to), join, neutral, x.dtype, which)


def _logical(which: str, func: Any, x: RaggedTensor, dims: _Dims = None, *_: Any) -> Kind:
    """``any`` is the largest of truth values, ``all`` the smallest."""
    if isinstance(dims, Sequence) and not len(dims):
        raise NotImplementedError(f"{func} over no dimensions of a RaggedTensor; use `x != 0`")
    found, join = (torch.any, torch.maximum) if which == "max" else (torch.all, torch.minimum)

    def local(part: torch.Tensor, over: list[int], wanted: torch.dtype) -> torch.Tensor:
        truth: torch.Tensor = found(part.bool(), dim=over)
        return truth.to(wanted)

    # Of truth values as 0 and 1, whatever the dtype: torch gives uint8 for uint8.
    dtype = torch.uint8 if x.dtype == torch.uint8 else torch.bool
    return Kind(local, join, which == "min", dtype, which)


def _norm(
    func: Any,
    x: RaggedTensor,
    order: float = 2,
    dims: _Dims = None,
    *_: Any,
    dtype: torch.dtype | None = None,
) -> Kind:
    order = float(order)
    # Every rank raises where torch does, also one without elements.
    if not _has_fractions(x):
        raise RuntimeError(f"{func}: expected a tensor of floating-point numbers, got {x.dtype}")
    is_extreme = order < 0 or order == math.inf
    if is_extreme and any(x.shape[d] == 0 for d in _dims(x, dims)):
        raise RuntimeError(
            f"{func}: an empty tensor has no norm of order {order}; got {tuple(x.shape)}"
        )
    computed = dtype or x.dtype
    result = computed.to_real()

    def local(part: torch.Tensor, over: list[int], wanted: torch.dtype) -> torch.Tensor:
        working = computed if wanted == result else torch.promote_types(computed, wanted)
        norm: torch.Tensor = torch.linalg.vector_norm(part, order, over, dtype=working)
        return norm

    def join(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([one, other]), order, 0)
        return norm

    if order == math.inf:
        return Kind(local, torch.maximum, 0.0, result, "max")
    if order == -math.inf:
        return Kind(local, torch.minimum, math.inf, result, "min")
    if order in (0.0, 1.0):
        return Kind(local, torch.add, 0.0, result, _SUM)
    return Kind(local, join, 0.0 if order > 0 else math.inf, result, NormPartial(order))


def _has_fractions(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def _dims(x: RaggedTensor, dims: _Dims) -> list[int]:
    """The dimensions that are reduced, counted from the front: all, if none is named."""
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or not x.dim():
        return [*range(x.dim())]
    for dim in dims:
        if not -x.dim() <= dim < x.dim():
            raise IndexError(
                f"dimension {dim} of a RaggedTensor of {x.dim()} dimensions does not exist; "
                f"expected one in [{-x.dim()}, {x.dim() - 1}]"
            )
    over = sorted(dim % x.dim() for dim in dims)
    if len(set(over)) < len(over):
        raise RuntimeError(f"a dimension appears twice in {dims}")
    return over


KINDS: dict[Any, Callable[..., Kind]] = {
    aten.all.default: partial(_logical, "min"),
    aten.all.dim: partial(_logical, "min"),
    aten.all.dims: partial(_logical, "min"),
    aten.amax.default: partial(_extreme, "max"),
    aten.amin.default: partial(_extreme, "min"),
    aten.any.default: partial(_logical, "max"),
    aten.any.dim: partial(_logical, "max"),
    aten.any.dims: partial(_logical, "max"),
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.linalg_vector_norm.default: _norm,
    aten.max.default: partial(_extreme, "max"),
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.min.default: partial(_extreme, "min"),
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
}


# --- over which elements --------------------------------------------------------------------------


def run_reduction(func: Any, x: RaggedTensor, *args: Any, **kwargs: Any) -> DTensor:
    """``x`` reduced over the dimensions that the arguments name; over all, if they name none.

    Cost: none where each slice is on one rank or the result is partial; else one all-reduce of the
    result per axis of the mesh along which ranks hold different elements.
    """
    refuse_partial(func, x._spec)
    kind = KINDS[func](func, x, *args, **kwargs)
    if func is aten.linalg_vector_norm.default:
        args = args[1:]  # after the order
    over, keepdim = _dims(x, args[0] if args else None), bool(args[1:] and args[1])
    keep_layout(x)
    shape = [1 if d in over else n for d, n in enumerate(x.shape) if keepdim or d not in over]
    if len(over) == x.dim():
        value = _of_all(x._local_tensor, kind).view(shape)
    else:
        result = _layout_of_slices(x._spec, over, shape, keepdim, kind)
        if result is not None:
            return wrap_local(_of_slices(x, over, kind, result), result, False)
        value = _of_boxes(x, over, kind).view(shape)
    return _wrapped(_combined_at_once(value, x._spec, kind), x._spec, kind)


def run_norms(
    func: Any, xs: Sequence[torch.Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """What clipping calls: the norm of each tensor. Some of them may be plain or DTensors.

    Those that are combined at once share an all-reduce per mesh, axes and dtype.
    """
    found: list[torch.Tensor] = []
    together: dict[Any, list[int]] = {}
    kinds = {
        i: _norm(func, x, order, dtype=dtype)
        for i, x in enumerate(xs)
        if isinstance(x, RaggedTensor)
    }
    for i, x in enumerate(xs):
        if not isinstance(x, RaggedTensor):
            found.append(torch.linalg.vector_norm(x, float(order), dtype=dtype))
            continue
        refuse_partial(func, x._spec)
        keep_layout(x)
        found.append(_of_all(x._local_tensor, kinds[i]))
        if isinstance(kinds[i].across, str):
            key = (x._spec.mesh, *_cut_axes(x._spec), kinds[i].across, kinds[i].dtype)
            together.setdefault(key, []).append(i)
    for members in together.values():
        stacked, spec = torch.stack([found[i] for i in members]), xs[members[0]]._spec  # type: ignore[attr-defined]
        combined = _combined_at_once(stacked, spec, kinds[members[0]])
        for i, value in zip(members, combined.unbind(), strict=True):
            found[i] = value.clone()
    for i, kind in kinds.items():
        found[i] = _wrapped(found[i], xs[i]._spec, kind)  # type: ignore[attr-defined]
    return found


def max_over_ranks(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The element-wise maximum over the ranks of ``group``; NaN where any rank has NaN."""
    return _extreme_over_ranks(values, group, "max")


def _extreme_over_ranks(values: torch.Tensor, group: dist.ProcessGroup, which: str) -> torch.Tensor:
    operation = dist.ReduceOp.MAX if which == "max" else dist.ReduceOp.MIN
    if not values.is_floating_point():
        numbers = values.to(torch.int64, copy=True)  # gloo does not know all integers
        collectives.all_reduce(numbers, group, operation).wait()
        return numbers.to(values.dtype)
    # NaN are sent beside the values, as the largest of flags; the smallest is minus the largest.
    is_nan, sign = values.isnan(), 1 if which == "max" else -1
    both = torch.stack([(sign * values).masked_fill(is_nan, -math.inf), is_nan.to(values.dtype)])
    collectives.all_reduce(both, group, dist.ReduceOp.MAX).wait()
    return (sign * both[0]).masked_fill(both[1].bool(), math.nan)


def _cut_axes(spec: DTensorSpec) -> list[int]:
    """The axes along which ranks hold different elements."""
    return [axis for axis, p in enumerate(spec.placements) if not p.is_replicate()]


def _combined_at_once(value: torch.Tensor, spec: DTensorSpec, kind: Kind) -> torch.Tensor:
    """What each rank found, combined now if the kind says so."""
    if isinstance(kind.across, str) and not value.is_meta:
        for axis in _cut_axes(spec):
            if spec.mesh.size(axis) > 1:
                group = collectives.mesh_group(spec.mesh, axis)
                value = _extreme_over_ranks(value, group, kind.across)
    return value


def _wrapped(value: torch.Tensor, spec: DTensorSpec, kind: Kind) -> DTensor:
    """What each rank found, in the shape of the whole result, as a DTensor."""
    placements: list[Placement] = [Replicate()] * spec.mesh.ndim
    if isinstance(kind.across, Placement):
        for axis in _cut_axes(spec):
            placements[axis] = kind.across
    return wrap_replicated(value, respecified_as(spec, value.shape, placements, value.dtype))


def _of_all(local: torch.Tensor, kind: Kind) -> torch.Tensor:
    if local.numel():
        return kind.local(local.view(-1), [0], kind.dtype)
    return local.new_full((), kind.neutral, dtype=kind.dtype)


def _layout_of_slices(
    spec: DTensorSpec, over: list[int], shape: Sequence[int], keepdim: bool, kind: Kind
) -> DTensorSpec | None:
    """The layout of the result where each slice is on one rank; else None."""
    kept = _kept(spec, over)
    if any(type(p) is Shard for p in spec.placements) and not keepdim and over[0] < kept:
        return None  # the sharded dimensions would move
    placements: list[Placement] = list(spec.placements)
    for axis, p in enumerate(placements):
        if type(p) is Shard:
            if p.dim in over:  # a ragged tensor that is partial would run few operators
                return None
            placements[axis] = p if keepdim else Shard(p.dim - sum(d < p.dim for d in over))
    result = rescaled(spec, kept, shape, placements)
    return None if result is None else respecified_as(result, dtype=kind.dtype)


def _kept(spec: DTensorSpec, over: list[int]) -> int:
    """How many leading dimensions stay; a reduction over a dimension of size 1 moves nothing."""
    return next((d for d in over if spec.shape[d] != 1), len(spec.shape))


def _of_slices(x: RaggedTensor, over: list[int], kind: Kind, result: DTensorSpec) -> torch.Tensor:
    """The local part of the result where each slice lies on one rank."""
    kept, sizes = _kept(x._spec, over), sizes_here(x._spec)
    start, stop = range_here(result)
    local = x._local_tensor
    if not local.numel():  # also where a Shard leaves a rank slices without elements
        return local.new_full((stop - start,), kind.neutral, dtype=kind.dtype)
    # The dimension of size 1 is for the case that no other is reduced.
    slices = local.view(-1, 1, *sizes[kept:])
    return kind.local(slices, [1, *(d - kept + 2 for d in over if d >= kept)], kind.dtype).view(-1)


def _of_boxes(x: RaggedTensor, over: list[int], kind: Kind) -> torch.Tensor:
    """What this rank's boxes contribute to the result, where reduced dimensions have size 1."""
    spec, local = x._spec, x._local_tensor
    # Results of boxes in half precision are joined in single precision, and rounded once.
    dtype = torch.float32 if kind.dtype in _HALF else kind.dtype
    shape = [1 if d in over else n for d, n in enumerate(spec.shape)]
    total = local.new_full(shape, kind.neutral, dtype=dtype)
    for box in held_here(spec).boxes:
        part = box.in_local(local)
        place = total
        for d in set(range(len(shape))).difference(over):
            place = place.narrow(d, box.offsets[d], box.sizes[d])
        value = kind.local(part, over, dtype)
        place.copy_(kind.join(place, value.view(place.shape)))
    return total.to(kind.dtype)


def product(func: Any, x: RaggedTensor, *args: Any, **kwargs: Any) -> Any:
    """``prod``: of the whole, as what is not in this file."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError(
            f"{func} of a RaggedTensor that requires a gradient: autograd's formula for it does "
            "not run on shards; use `x.abs().log().sum()`, or `.full_tensor()`"
        )
    return run_gathered(func, x, *args, **kwargs)


def equal(func: Any, one: torch.Tensor, other: torch.Tensor, *how: Any) -> bool:
    """``torch.equal`` and ``allclose``: one answer for all ranks, by an all-reduce of a number.

    A ragged tensor with another layout is first redistributed to that of the first one.
    """
    spec: DTensorSpec = next(x._spec for x in (one, other) if isinstance(x, RaggedTensor))
    refuse_partial(func, spec)
    if one.shape != other.shape:
        if func is aten.equal.default:
            return False
        raise ValueError(
            f"{func} got shapes {tuple(one.shape)} and {tuple(other.shape)}; beside a RaggedTensor "
            "they must be the same"
        )
    locals_ = [
        start_move(func, x, spec).wait()
        if isinstance(x, RaggedTensor)
        else local_beside(func, x, spec, in_list=False).view(-1)
        for x in (one, other)
    ]
    flag = torch.tensor(func(*locals_, *how), dtype=torch.uint8, device=locals_[0].device)
    for axis in range(spec.mesh.ndim):
        if spec.mesh.size(axis) > 1:
            group = collectives.mesh_group(spec.mesh, axis)
            collectives.all_reduce(flag, group, dist.ReduceOp.MIN).wait()
    return bool(flag)
