"""What differs between torch 2.11 and 2.13, and the private parts of torch that we rely on.

Everything that is not public API, or that changed its name, is reached from here and from
nowhere else, so that a new torch release is a change to one file.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial
from torch.optim.optimizer import _foreach_supported_types

__all__ = [
    "DTensorSpec",
    "NormPartial",
    "Store",
    "TensorMeta",
    "all_gather_single",
    "all_to_all_single",
    "current_backward",
    "default_store",
    "mesh_group",
    "new_group",
    "queue_backward_callback",
    "reduce_scatter_single",
    "store_wait",
    "support_foreach",
]


def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work:
    """Start an even all-gather into one flat tensor. Resolved at call time, so tools can count."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(output, input, group=group, async_op=True)
    return work


def reduce_scatter_single(
    output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup
) -> dist.Work:
    """Start an even reduce-scatter of one flat tensor."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = scatter(output, input, op=op, group=group, async_op=True)
    return work


def all_to_all_single(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work:
    """Start an even all-to-all of one flat tensor."""
    work: dist.Work = dist.all_to_all_single(output, input, group=group, async_op=True)
    return work


def new_group(ranks: list[int]) -> dist.ProcessGroup:
    """A communicator of its own for these global ranks; only they have to call."""
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "the caller is one of the ranks"
    return group


def default_store() -> Store:
    """The key-value store behind the default process group."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def store_wait(store: Store, key: str, timeout_s: float) -> None:
    """Block until ``key`` is set. Raises ``dist.DistStoreError`` after ``timeout_s`` seconds."""
    store.wait([key], datetime.timedelta(seconds=timeout_s))


def current_backward() -> int:
    """Identity of the autograd graph task that this thread runs, or -1 outside a backward."""
    return int(torch._C._current_graph_task_id())


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now has visited all of its nodes."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def support_foreach(tensor_type: type[torch.Tensor]) -> None:
    """Let ``torch.optim`` pick its foreach kernels for a tensor type: it goes by exact type."""
    if tensor_type not in _foreach_supported_types:
        _foreach_supported_types.append(tensor_type)


def mesh_group(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The process group along one axis of a mesh."""
    group: dist.ProcessGroup = mesh.get_group(axis)
    return group
