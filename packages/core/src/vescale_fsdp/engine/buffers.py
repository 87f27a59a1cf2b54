"""Broadcasts buffers that a forward changes, such as BatchNorm's running statistics.

``DistributedDataParallel`` broadcasts them from rank 0 at the beginning of a forward. With FSDP2
each rank has its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat

if TYPE_CHECKING:
    from vescale_fsdp.engine.axes import Axes


def plain_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module by name, without DTensors and empty ones."""
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if not isinstance(buffer, DTensor) and not buffer.is_meta and buffer.numel()
    }


@torch.no_grad()
def broadcast_buffers(module: nn.Module, axes: Iterable[Axes]) -> None:
    """Broadcast the buffers of the first rank. Collective.

    As in DDP, the writes are hidden from autograd, which may have saved the buffers for a backward.

    Args:
        axes: of the module's groups. Those with the most ranks are used.

    Cost: one message of all buffers; two with replicas.
    """
    buffers = list(plain_buffers(module).values())
    widest = max(axes, key=lambda each: len(each.ranks), default=None)
    if not buffers or widest is None or len(widest.ranks) == 1:
        return
    # Wide dtypes first, so that each part begins where its dtype may.
    buffers.sort(key=lambda buffer: -buffer.element_size())
    device = torch.device(widest.mesh.device_type)
    packed = torch.cat([b.reshape(-1).view(torch.uint8).to(device) for b in buffers])
    for axis in (widest.replicate, widest.shard):
        if axis is not None and widest.mesh.size(axis) > 1:
            first = compat.axis_ranks(widest.mesh, axis)[0]
            compat.broadcast(packed, first, compat.mesh_group(widest.mesh, axis)).wait()
    if widest.rank == widest.replica == 0:
        return
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    with compat.preserve_versions(tuple(buffers)):
        for buffer, part in zip(buffers, packed.split(sizes), strict=True):
            buffer.copy_(part.view(buffer.dtype).view(buffer.shape))
