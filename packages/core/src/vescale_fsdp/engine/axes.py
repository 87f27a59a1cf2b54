"""Which axes of a mesh a group is sharded over, and which it is replicated over.

One axis: all ranks share the work of holding the parameters. Two axes, hybrid sharding (HSDP): the
inner axis shards, the outer one holds replicas of the same shards. Four ranks as 2 x 2::

                        inner 0      inner 1
    outer 0 (replica)   shard 0      shard 1      gathers and reduce-scatters along a row,
    outer 1 (replica)   shard 0      shard 1      then sums of the reduced shards along a column

The communicators of the axes are made once, and shared by all models on the mesh.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat
from vescale_fsdp.backends import backend_name, spelling_of
from vescale_fsdp.dbuffer import Comm, choose_reduction, let_ranks_go_first
from vescale_fsdp.engine.zero_table import Row


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh by what they do for a group of parameters."""

    mesh: DeviceMesh
    shard: int | None  # the axis that shards; None: all ranks hold everything
    replicate: int | None = None  # the axis that holds replicas, if there is one
    whole: DeviceMesh | None = (
        None  # with all axes of the job, if its parameters are DTensors on it
    )
    data_names: tuple[str, ...] = ()  # of the axes of ``whole`` that this class is about
    cuts_outside: bool = False  # also shard optimizer state over the replicas
    _joined: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Axes:
        """The last axis shards; the first of two holds replicas."""
        return cls(mesh, mesh.ndim - 1, 0 if mesh.ndim == 2 else None)

    @classmethod
    def named(cls, whole: DeviceMesh, shard: Sequence[str], replicate: Sequence[str]) -> Axes:
        """Axes of a mesh that has others too, by name; several names are flattened into one."""
        parts = [_part(whole, names) for names in (replicate, shard) if names]
        mesh = parts[0] if len(parts) == 1 else compat.concatenate_meshes(parts)
        cut = mesh.ndim - 1 if shard else None
        return cls(mesh, cut, 0 if replicate else None, whole, (*replicate, *shard))

    def as_in(self, row: Row) -> Axes:
        """These axes, used as a row of the table of ZeRO's stages says."""
        if not row.cuts_states:
            return replace(self, shard=None, replicate=0)
        return replace(self, cuts_outside=row.cuts_states_outside and self.num_replicas > 1)

    @property
    def inner_names(self) -> tuple[str, ...]:
        """The names of the other axes of ``whole``: of tensor parallelism and the like."""
        names = self.whole.mesh_dim_names if self.whole is not None else None
        return tuple(name for name in names or () if name not in self.data_names)

    def _place(self, axis: int | None) -> int:
        coordinate = self.mesh.get_coordinate()  # the group's own ranks may be in another order
        assert coordinate is not None, "the caller is part of the mesh"
        return 0 if axis is None else int(coordinate[axis])

    @cached_property
    def rank(self) -> int:
        """Of the caller along the axis that shards."""
        return self._place(self.shard)

    @cached_property
    def replica(self) -> int:
        """Of the caller along the axis that holds replicas."""
        return self._place(self.replicate)

    @property
    def num_axes(self) -> int:
        """One, or two with replicas of shards."""
        return 1 if self.shard is None or self.replicate is None else 2

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else int(self.mesh.size(self.shard))

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicate is None else int(self.mesh.size(self.replicate))

    @cached_property
    def shard_ranks(self) -> tuple[int, ...]:
        """The global ranks that hold one replica together, the caller among them."""
        if self.shard is None:
            return (dist.get_rank(),)
        return tuple(compat.axis_ranks(self.mesh, self.shard))

    @cached_property
    def replica_ranks(self) -> tuple[int, ...]:
        """The global ranks that hold the caller's shard."""
        if self.replicate is None:
            return (dist.get_rank(),)
        return tuple(compat.axis_ranks(self.mesh, self.replicate))

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The mesh's own process groups: of the shards, then of the replicas."""
        axes = [axis for axis in (self.shard, self.replicate) if axis is not None]
        return [compat.mesh_group(self.mesh, axis) for axis in axes]

    @property
    def ranks(self) -> list[int]:
        """All global ranks that hold a part, ascending."""
        return sorted(self.mesh.mesh.flatten().tolist())

    def __repr__(self) -> str:
        """What is the same on all of `ranks`."""
        used = f"sharded over axis {self.shard}, replicated over {self.replicate}"
        return f"a mesh of ranks {self.mesh.mesh.tolist()}, {used}"

    # What rests, between steps

    @property
    def resting_rank(self) -> int:
        """Of the caller among all that cut what rests: those of one inner shard come together."""
        if self.cuts_outside:
            return self.rank * self.num_replicas + self.replica
        return self.rank

    @property
    def num_resting_shards(self) -> int:
        return self.num_shards * (self.num_replicas if self.cuts_outside else 1)

    @cached_property
    def resting_mesh(self) -> DeviceMesh:
        """The mesh of the sharded parameters. Collective at the first call if it is a new one."""
        if not self.cuts_outside:
            return self.mesh
        assert self.shard is not None, "a row that cuts outside cuts inside"
        inner_first = self.mesh.mesh if self.shard == 0 else self.mesh.mesh.t()
        return compat.mesh_over(inner_first.flatten().tolist(), self.mesh)

    def joined(self, inner: DeviceMesh) -> DeviceMesh:
        """The mesh of these axes and, after them, those of ``inner``.

        Raises:
            ValueError: the two are not cut from one mesh.
        """
        if inner not in self._joined:
            try:
                self._joined[inner] = compat.concatenate_meshes([self.mesh, inner])
            except RuntimeError as error:
                raise ValueError(
                    f"fully_shard: {self.mesh} and the mesh of a DTensor parameter, {inner}, are "
                    "not parts of one mesh; make one mesh of all axes and pass its parts, "
                    'mesh["data"] and mesh["tensor"]'
                ) from error
        return self._joined[inner]

    def placements(self, sharded: Placement) -> tuple[Placement, ...]:
        """One placement per axis of the resting mesh: ``sharded`` where it shards."""
        if self.cuts_outside:
            return (sharded,)
        return tuple(
            sharded if axis == self.shard else Replicate() for axis in range(self.mesh.ndim)
        )


def _part(whole: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    if len(names) == 1:
        return whole[names[0]]
    flat: DeviceMesh = whole[tuple(names)]._flatten()
    return flat


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
