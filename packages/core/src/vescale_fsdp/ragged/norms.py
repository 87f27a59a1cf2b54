"""Norms over all elements of ragged tensors.

A p-norm of the whole is the p-norm of the local p-norms: it is returned as a DTensor that is
partial along the ragged axis, and reduced when somebody needs the value. The largest element is
reduced at once, since a maximum over ranks must not lose a NaN (gloo's and NCCL's do).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat
from vescale_fsdp.compat import NormPartial
from vescale_fsdp.ragged.tensor import RaggedTensor

__all__ = ["max_over_ranks", "vector_norm"]


def vector_norm(tensor: Any, order: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The norm over all elements of a tensor, ragged or plain.

    Cost: none for finite orders (the result is partial), one small all-reduce for ``inf``.

    Raises:
        NotImplementedError: the order is negative.
    """
    if not isinstance(tensor, RaggedTensor):
        plain: torch.Tensor = torch.linalg.vector_norm(tensor, order, dtype=dtype)
        return plain
    if order < 0:
        raise NotImplementedError(
            f"the norm of order {order} of a RaggedTensor is not there yet; use `.full_tensor()`"
        )
    value = _local_norm(tensor._local_tensor, order, dtype)
    axis = tensor.ragged_axis
    if order == math.inf:
        value = max_over_ranks(value, compat.mesh_group(tensor.device_mesh, axis))
    placements = list(tensor._spec.placements)
    placements[axis] = _combination(order)
    return DTensor.from_local(value, tensor.device_mesh, placements, run_check=False)


def max_over_ranks(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The element-wise maximum over the ranks of ``group``; NaN where any rank has NaN."""
    is_nan = values.isnan()
    both = torch.stack([values.masked_fill(is_nan, -math.inf), is_nan.to(values.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0].masked_fill(both[1].bool(), math.nan)


def _local_norm(local: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    if local.numel() == 0:  # has no largest element, but adds nothing to any norm
        return local.new_zeros((), dtype=dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(local, order, dtype=dtype)
    return norm


def _combination(order: float) -> Placement:
    """How the norms of the ranks make the norm of the whole."""
    if order == math.inf:
        return Replicate()
    return Partial("sum") if order in (0.0, 1.0) else NormPartial(order)
