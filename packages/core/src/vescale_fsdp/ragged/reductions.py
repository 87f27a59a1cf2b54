"""Sums, means, extremes and norms of ragged tensors, over all or some dimensions.

| what is reduced | result |
|---|---|
| whole slices of leading dimensions that stay, each on one rank | ragged, no communication |
| anything else: sum, mean, prod, ``count_nonzero``, norms of finite order | DTensor, ``Partial`` |
| anything else: max, min, any, all, norms of infinite order | DTensor, ``Replicate`` |

A ``Partial`` result is reduced at its first use (``full_tensor()``, ``item()``, the next
operator that is not linear), so sums of many tensors can share one all-reduce. What becomes a
number of Python is the global one, on every rank. Where results are partial and some dimensions
stay, each rank adds its boxes into a result of full shape; parts without elements contribute the
neutral element.

Extremes are reduced at once, by one all-reduce of the result per sharding axis: the maximum of
gloo and of NCCL loses a NaN, so NaN are sent beside the values, which a ``Partial("max")`` could
not do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.ragged.mixing import keep_layout, refuse_partial
from vescale_fsdp.ragged.recuts import (
    held_here,
    range_here,
    rescaled,
    respecified_as,
    sizes_here,
)
from vescale_fsdp.ragged.reduced import reduced
from vescale_fsdp.ragged.tensor import RaggedTensor, wrap_local
from vescale_fsdp.ragged.views import dim_of
from vescale_fsdp.ranks import collectives


class Kind(NamedTuple):
    """One way to reduce, apart from the dimensions."""

    # (a part, dimensions, dtype of the result) -> the part without these dimensions
    local: Callable[[torch.Tensor, list[int], torch.dtype], torch.Tensor]
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of two results
    neutral: float | int | bool  # what a part without elements contributes
    dtype: torch.dtype  # of the result
    across: Placement | str  # how ranks are combined: a Partial, or "max" or "min" at once


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
    result = respecified_as(spec, value.shape, placements, value.dtype)
    return reduced(value, result)


def reduce(
    func: Any,
    x: RaggedTensor,
    kind: Kind,
    dims: int | Sequence[int] | None = None,
    keepdim: bool = False,
) -> DTensor:
    """``x`` reduced over ``dims``; over all, if that is None or empty.

    Cost: none where each slice is on one rank or the result is partial; else one all-reduce of the
    result per axis of the mesh along which ranks hold different elements.
    """
    refuse_partial(func, x._spec)
    dims = [dims] if isinstance(dims, int) else dims
    over = sorted(dim_of(dim, x.dim()) for dim in dims) if dims and x.dim() else range(x.dim())
    if len(set(over)) < len(over):
        raise RuntimeError(f"a dimension appears twice in {dims}")
    keep_layout(x)
    shape = [1 if d in over else n for d, n in enumerate(x.shape) if keepdim or d not in over]
    if len(over) == x.dim():
        value = _of_all(x._local_tensor, kind).view(shape)
    else:
        result = layout_of_slices(x._spec, list(over), shape, keepdim, kind)
        if result is not None:
            return wrap_local(_of_slices(x, list(over), kind, result), result, False)
        value = _of_boxes(x, list(over), kind).view(shape)
    return _wrapped(_combined_at_once(value, x._spec, kind), x._spec, kind)


def reduce_each(func: Any, xs: Sequence[RaggedTensor], kinds: Sequence[Kind]) -> list[DTensor]:
    """Each tensor reduced over all its dimensions.

    Those that are combined at once share an all-reduce per mesh, axes and dtype.
    """
    for x in xs:
        refuse_partial(func, x._spec)
    values = [_of_all(x._local_tensor, kind) for x, kind in zip(xs, kinds, strict=True)]
    together: dict[Any, list[int]] = {}
    for i, (x, kind) in enumerate(zip(xs, kinds, strict=True)):
        keep_layout(x)
        if isinstance(kind.across, str):
            key = (x._spec.mesh, *_cut_axes(x._spec), kind.across, kind.dtype)
            together.setdefault(key, []).append(i)
    for members in together.values():
        stacked, first = torch.stack([values[i] for i in members]), members[0]
        combined = _combined_at_once(stacked, xs[first]._spec, kinds[first])
        for i, value in zip(members, combined.unbind(), strict=True):
            values[i] = value.clone()
    return [_wrapped(v, x._spec, kind) for v, x, kind in zip(values, xs, kinds, strict=True)]


def _of_all(local: torch.Tensor, kind: Kind) -> torch.Tensor:
    if local.numel():
        return kind.local(local.view(-1), [0], kind.dtype)
    return local.new_full((), kind.neutral, dtype=kind.dtype)


def layout_of_slices(
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
    dtype = torch.float32 if kind.dtype in (torch.float16, torch.bfloat16) else kind.dtype
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
