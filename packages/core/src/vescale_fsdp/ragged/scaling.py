"""Unscaling of gradients, as ``torch.amp.GradScaler`` does it: all ranks find the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat


def _unscale(
    func: Any, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Multiply the parts of gradients in place, and set ``found_inf`` if any rank found one.

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
        group = compat.mesh_group(mesh, axis)
        compat.all_reduce(found_inf, group, dist.ReduceOp.MAX).wait()


SCALING: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale
}
