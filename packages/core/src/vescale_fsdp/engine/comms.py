"""The communicators of a mesh axis, made once and shared by all models on it."""

from __future__ import annotations

import atexit

import torch.distributed as dist

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import Comm, choose_reduction
from vescale_fsdp.engine.group import Group

__all__ = ["comm_for"]

# By the ranks of the axis. With each the world it belongs to: after a restart of torch.distributed
# it is of no use.
_COMMS: dict[tuple[int, ...], tuple[dist.ProcessGroup | None, Comm]] = {}
atexit.register(_COMMS.clear)  # gloo does not like to be taken down by the interpreter


def comm_for(group: Group) -> Comm:
    """The communicators of a group's mesh axis. Collective over the axis at the first call."""
    axis_group = compat.mesh_group(group.mesh, 0)
    ranks = compat.axis_ranks(group.mesh, 0)
    world, comm = _COMMS.get(tuple(ranks), (None, None))
    if comm is None or world is not dist.group.WORLD:
        comm = Comm(
            gather_group=compat.new_group(ranks),
            reduce_group=compat.new_group(ranks),
            rank=group.rank,
            size=group.num_shards,
            reduction=choose_reduction(dist.get_backend(axis_group)),
        )
        _COMMS[tuple(ranks)] = (dist.group.WORLD, comm)
    return comm
