"""The communicators of the axes of a mesh, made once and shared by all models on them."""

from __future__ import annotations

import atexit

import torch.distributed as dist

from vescale_fsdp import compat
from vescale_fsdp.backends import backend_name, spelling_of
from vescale_fsdp.dbuffer import Comm, choose_reduction, let_ranks_go_first
from vescale_fsdp.engine.axes import Axes

# By the ranks of the axes and their backends. With each the world it belongs to: after a restart of
# torch.distributed it is of no use.
_COMMS: dict[tuple[object, ...], tuple[dist.ProcessGroup | None, Comm]] = {}
atexit.register(_COMMS.clear)  # gloo does not like to be taken down by the interpreter


def comm_for(axes: Axes) -> Comm:
    """The communicators of these axes. Collective over the axes at the first call."""
    of_shards, of_replicas = axes.groups[0], axes.groups[-1]
    device = axes.mesh.device_type
    spellings = (device, spelling_of(of_shards), spelling_of(of_replicas))
    key = (axes.shard_ranks, axes.replica_ranks, spellings)
    world, comm = _COMMS.get(key, (None, None))
    if comm is None or world is not dist.group.WORLD:
        has_replicas = axes.num_replicas > 1
        comm = Comm(
            gather_group=compat.new_group(list(axes.shard_ranks), of_shards),
            reduce_group=compat.new_group(list(axes.shard_ranks), of_shards),
            rank=axes.rank,
            size=axes.num_shards,
            reduction=choose_reduction(backend_name(of_shards, device)),
            replica_group=(
                compat.new_group(list(axes.replica_ranks), of_replicas) if has_replicas else None
            ),
            num_replicas=axes.num_replicas,
            replica=axes.replica,
        )
        let_ranks_go_first()
        _COMMS[key] = (dist.group.WORLD, comm)
    return comm
