"""Norms of ragged tensors, of any order, over all or some dimensions.

A p-norm of the whole is the p-norm of the p-norms of its parts: the result is partial in that
sense (`compat.NormPartial`), and reduced when somebody needs the value. The largest and the
smallest absolute value are reduced at once; see file `reductions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from vescale_fsdp.compat import NormPartial
from vescale_fsdp.ragged.linear import refuse_partial
from vescale_fsdp.ragged.reductions import Kind, is_number, reduce, reduce_each
from vescale_fsdp.ragged.tensor import RaggedTensor
from vescale_fsdp.ragged.views import dim_of

aten = torch.ops.aten


def _norm(
    func: Any,
    x: RaggedTensor,
    order: float = 2,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> DTensor:
    order = float(order)
    _check(func, x, order, dims)
    return reduce(x, _kind(x.dtype, order, dtype), dims, keepdim)


def _foreach_norm(
    func: Any, xs: Sequence[torch.Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """What clipping calls: the norm of each tensor. Some of them may be plain or DTensors."""
    order = float(order)
    ragged = [x for x in xs if isinstance(x, RaggedTensor)]
    for x in ragged:
        _check(func, x, order, None)
    norms = iter(reduce_each(ragged, [_kind(x.dtype, order, dtype) for x in ragged]))
    return [
        next(norms)
        if isinstance(x, RaggedTensor)
        else torch.linalg.vector_norm(x, order, dtype=dtype)
        for x in xs
    ]


def _check(func: Any, x: RaggedTensor, order: float, dims: Sequence[int] | None) -> None:
    """Raises where torch does: on every rank alike, whatever it holds."""
    refuse_partial(func, x._spec)
    if not is_number(x.dtype):
        raise RuntimeError(f"{func}: expected a tensor of floating-point numbers, got {x.dtype}")
    if x.numel() or not (order < 0 or order == math.inf):
        return
    over = [dim_of(dim, x.dim()) for dim in dims] if dims else range(x.dim())
    if any(x.shape[d] == 0 for d in over):
        raise RuntimeError(f"{func}: nothing has no norm of order {order}; got {tuple(x.shape)}")


def _kind(given: torch.dtype, order: float, dtype: torch.dtype | None) -> Kind:
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
        return Kind(local, torch.add, 0.0, result, Partial("sum"))
    return Kind(local, join, 0.0 if order > 0 else math.inf, result, NormPartial(order))


NORMS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
}
