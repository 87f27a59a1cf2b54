"""Sum, mean, product, count, extremes, any, all and norms of ragged tensors, and ``torch.equal``.

File `reductions` says what layout comes out and how ranks are combined. A p-norm of the whole is
the p-norm of the p-norms of its parts: the result is partial in that sense (`compat.NormPartial`),
and reduced at the first use of its value. Extremes are combined at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

from vescale_fsdp.compat import DTensorSpec, NormPartial
from vescale_fsdp.ragged.gathered import run_gathered
from vescale_fsdp.ragged.mixing import local_beside, refuse_partial, start_move
from vescale_fsdp.ragged.recuts import respecified_as, sizes_here
from vescale_fsdp.ragged.reductions import Kind, layout_of_slices, reduce, reduce_each
from vescale_fsdp.ragged.tensor import RaggedTensor, wrap_local
from vescale_fsdp.ragged.views import dim_of
from vescale_fsdp.ranks import collectives

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_SUM = Partial("sum")


def _sum(func: Any, x: RaggedTensor, *over: Any, dtype: torch.dtype | None = None) -> DTensor:
    kind = Kind(
        lambda part, dims, wanted: torch.sum(part, dims, dtype=wanted),
        torch.add,
        0,
        _summed_dtype(x, dtype),
        _SUM,
    )
    return reduce(func, x, kind, *over)


def _mean(func: Any, x: RaggedTensor, *over: Any, dtype: torch.dtype | None = None) -> DTensor:
    """The local sums divided by the global number of elements: means of parts do not add up."""
    result = dtype or x.dtype
    if not _is_number(result):
        raise RuntimeError(f"{func}: the mean of {result} is not defined; pass a dtype of numbers")
    count = math.prod(x.shape[d] for d in _dims(x, *over))

    def local(part: torch.Tensor, dims: list[int], wanted: torch.dtype) -> torch.Tensor:
        # A sum in half precision overflows where the mean does not.
        working = torch.float32 if wanted in _HALF else wanted
        return (torch.sum(part, dims, dtype=working) / count).to(wanted)

    neutral = 0.0 if count else math.nan  # the mean of nothing is not a number
    return reduce(func, x, Kind(local, torch.add, neutral, result, _SUM), *over)


def _prod(func: Any, x: RaggedTensor, *over: Any, dtype: torch.dtype | None = None) -> DTensor:
    refuse_partial(func, x._spec)
    _refuse_gradient(func, x, "use `x.abs().log().sum()`, or `.full_tensor()`")

    def local(part: torch.Tensor, dims: list[int], wanted: torch.dtype) -> torch.Tensor:
        for d in reversed(dims):
            part = torch.prod(part, d, dtype=wanted)
        return part

    kind = Kind(local, torch.mul, 1, _summed_dtype(x, dtype), Partial("product"))
    return reduce(func, x, kind, *over)


def _count_nonzero(func: Any, x: RaggedTensor, dims: int | Sequence[int] | None = None) -> DTensor:
    kind = Kind(
        lambda part, over, wanted: torch.count_nonzero(part, over).to(wanted),
        torch.add,
        0,
        torch.int64,
        _SUM,
    )
    return reduce(func, x, kind, dims)


def _extreme(which: str, func: Any, x: RaggedTensor, dims: Any = None, *keepdim: bool) -> DTensor:
    """``max`` and ``min`` of all elements, ``amax`` and ``amin`` over some dimensions."""
    if any(x.shape[d] == 0 for d in _dims(x, dims)):
        error = IndexError if dims else RuntimeError  # as torch has it
        raise error(
            f"{func}: an empty tensor has no {which}; got {tuple(x.shape)}, dimensions {dims}"
        )
    return reduce(func, x, _extreme_kind(x.dtype, which), dims, *keepdim)


def _extreme_kind(dtype: torch.dtype, which: str) -> Kind:
    low: float
    high: float
    if dtype == torch.bool:
        low, high = False, True
    elif dtype.is_floating_point:
        low, high = -math.inf, math.inf
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    extreme = torch.amax if which == "max" else torch.amin
    join = torch.maximum if which == "max" else torch.minimum
    neutral = low if which == "max" else high
    return Kind(lambda part, over, to: extreme(part, over).to(to), join, neutral, dtype, which)


def _extreme_with_indices(
    which: str, func: Any, x: RaggedTensor, dim: int, keepdim: bool = False
) -> tuple[DTensor, DTensor]:
    """``max(dim)`` and ``min(dim)``: values and indices. Slices on several ranks are gathered."""
    refuse_partial(func, x._spec)
    other = "use `amax` or `amin`, which give the values alone, or `.full_tensor()`"
    _refuse_gradient(func, x, other)
    dim = dim_of(dim, x.dim())
    if x.dim() and not x.shape[dim]:
        raise IndexError(
            f"{func}: an empty tensor has no {which}; got {tuple(x.shape)}, dimension {dim}"
        )
    shape = [1 if d == dim else n for d, n in enumerate(x.shape) if keepdim or d != dim]
    kind = _extreme_kind(x.dtype, which)
    spec = layout_of_slices(x._spec, [dim], shape, keepdim, kind) if x.dim() > 1 else None
    if spec is None:
        return cast(tuple[DTensor, DTensor], run_gathered(func, (x, dim, keepdim), {}))
    # A dimension of size 1 is the same as one of size 1 behind all others.
    slices = (*sizes_here(x._spec)[dim:],) if x.shape[dim] != 1 else (1,)
    count = x._local_tensor.numel() // (math.prod(slices) or 1)
    extreme = torch.max if which == "max" else torch.min
    values, indices = extreme(x._local_tensor.view(count, *slices), 1)
    return (
        wrap_local(values.reshape(-1), spec, False),
        wrap_local(indices.reshape(-1), respecified_as(spec, dtype=torch.int64), False),
    )


def _both_extremes(
    func: Any, x: RaggedTensor, *, dim: int | None = None, keepdim: bool = False
) -> tuple[DTensor, DTensor]:
    """``aminmax``: two reductions."""
    dims = None if dim is None else [dim]
    low, high = (_extreme(which, func, x, dims, keepdim) for which in ("min", "max"))
    return low, high


def _logical(which: str, func: Any, x: RaggedTensor, dims: Any = None, *keepdim: bool) -> DTensor:
    """``any`` is the largest of truth values, ``all`` the smallest."""
    refuse_partial(func, x._spec)
    if isinstance(dims, Sequence) and not len(dims):
        raise NotImplementedError(f"{func} over no dimensions of a RaggedTensor; use `x != 0`")
    found = torch.any if which == "max" else torch.all

    def local(part: torch.Tensor, over: list[int], wanted: torch.dtype) -> torch.Tensor:
        truth: torch.Tensor = found(part.bool(), dim=over)
        return truth.to(wanted)

    # Of truth values as 0 and 1, whatever the dtype: torch gives uint8 for uint8.
    join = torch.maximum if which == "max" else torch.minimum
    dtype = torch.uint8 if x.dtype == torch.uint8 else torch.bool
    return reduce(func, x, Kind(local, join, which == "min", dtype, which), dims, *keepdim)


def _variance(
    what: Callable[[torch.Tensor, torch.Tensor], Any],
    func: Any,
    x: RaggedTensor,
    dims: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """``var``, ``std`` and with the mean: the mean square of the differences from the mean.

    Cost: as of a mean and a sum. The mean is reduced where it is partial, to compute differences.
    """
    refuse_partial(func, x._spec)
    if x.dtype.is_complex:
        return run_gathered(func, (x, dims), {"correction": correction, "keepdim": keepdim})
    if not x.dtype.is_floating_point:
        raise RuntimeError(f"{func}: expected a tensor of floating-point numbers, got {x.dtype}")
    count = math.prod(x.shape[d] for d in _dims(x, dims))
    with torch.no_grad():
        working = cast(RaggedTensor, _as_dtype(x, torch.float32 if x.dtype in _HALF else x.dtype))
        over = sorted(_dims(x, dims))
        mean = working.mean(over, keepdim=True)
        total = (working - mean).square_().sum(over, keepdim=keepdim)
        divisor = max(count - (1 if correction is None else correction), 0)
        # By zero only when it is whole: a rank without elements would divide zero.
        variance = total / divisor if divisor else total.div_(divisor)
        mean = mean if keepdim else working.mean(over)
        return what(_as_dtype(variance, x.dtype), _as_dtype(mean, x.dtype))


def _as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else aten._to_copy.default(x, dtype=dtype)


def _norm(
    func: Any, x: RaggedTensor, order: float = 2, *over: Any, dtype: torch.dtype | None = None
) -> DTensor:
    _check_norm(func, x, float(order), *over)
    return reduce(func, x, _norm_kind(x.dtype, float(order), dtype), *over)


def _foreach_norm(
    func: Any, xs: Sequence[torch.Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """What clipping calls: the norm of each tensor. Some of them may be plain or DTensors."""
    order = float(order)
    ragged = [x for x in xs if isinstance(x, RaggedTensor)]
    for x in ragged:
        _check_norm(func, x, order)
    kinds = [_norm_kind(x.dtype, order, dtype) for x in ragged]
    norms = iter(reduce_each(func, ragged, kinds))
    return [
        next(norms)
        if isinstance(x, RaggedTensor)
        else torch.linalg.vector_norm(x, order, dtype=dtype)
        for x in xs
    ]


def _check_norm(func: Any, x: RaggedTensor, order: float, *over: Any) -> None:
    """Raise where torch does. Every rank raises, also one without elements."""
    if not _is_number(x.dtype):
        raise RuntimeError(f"{func}: expected a tensor of floating-point numbers, got {x.dtype}")
    is_extreme = order < 0 or order == math.inf
    if not x.numel() and is_extreme and any(x.shape[d] == 0 for d in _dims(x, *over)):
        raise RuntimeError(
            f"{func}: an empty tensor has no norm of order {order}; got {tuple(x.shape)}"
        )


def _norm_kind(given: torch.dtype, order: float, dtype: torch.dtype | None) -> Kind:
    computed = dtype or given
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


def _equal(func: Any, one: torch.Tensor, other: torch.Tensor, *how: Any) -> bool:
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
    locals_ = []
    for x in (one, other):
        if not isinstance(x, RaggedTensor):
            locals_.append(local_beside(func, x, spec, in_list=False).view(-1))
        else:
            locals_.append(start_move(func, x, spec).wait())
    flag = torch.tensor(func(*locals_, *how), dtype=torch.uint8, device=locals_[0].device)
    for axis in range(spec.mesh.ndim):
        if spec.mesh.size(axis) > 1:
            group = collectives.mesh_group(spec.mesh, axis)
            collectives.all_reduce(flag, group, dist.ReduceOp.MIN).wait()
    return bool(flag)


def _is_number(dtype: torch.dtype) -> bool:
    """Whether a dtype has fractions: neither integers nor truth values."""
    return dtype.is_floating_point or dtype.is_complex


def _summed_dtype(x: RaggedTensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or (x.dtype if _is_number(x.dtype) else torch.int64)


def _dims(x: RaggedTensor, dims: Sequence[int] | None = None, *_: Any) -> set[int]:
    """The dimensions that are reduced, counted from the front."""
    return {dim_of(dim, x.dim()) for dim in dims} if dims and x.dim() else set(range(x.dim()))


def _refuse_gradient(func: Any, x: RaggedTensor, way_out: str) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError(
            f"{func} of a RaggedTensor that requires a gradient: autograd's formula for it does "
            f"not run on shards; {way_out}"
        )


AGGREGATES: dict[Any, Callable[..., Any]] = {
    aten.all.default: partial(_logical, "min"),
    aten.all.dim: partial(_logical, "min"),
    aten.all.dims: partial(_logical, "min"),
    aten.allclose.default: _equal,
    aten.amax.default: partial(_extreme, "max"),
    aten.amin.default: partial(_extreme, "min"),
    aten.aminmax.default: _both_extremes,
    aten.any.default: partial(_logical, "max"),
    aten.any.dim: partial(_logical, "max"),
    aten.any.dims: partial(_logical, "max"),
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.equal.default: _equal,
    aten.linalg_vector_norm.default: _norm,
    aten.max.default: partial(_extreme, "max"),
    aten.max.dim: partial(_extreme_with_indices, "max"),
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.min.default: partial(_extreme, "min"),
    aten.min.dim: partial(_extreme_with_indices, "min"),
    aten.prod.default: _prod,
    aten.prod.dim_int: _prod,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.std.correction: partial(_variance, lambda variance, mean: variance.sqrt()),
    aten.std_mean.correction: partial(_variance, lambda variance, mean: (variance.sqrt(), mean)),
    aten.var.correction: partial(_variance, lambda variance, mean: variance),
    aten.var_mean.correction: partial(_variance, lambda variance, mean: (variance, mean)),
    aten._foreach_norm.Scalar: _foreach_norm,
}
