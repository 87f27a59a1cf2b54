"""Over which axes of a mesh a group is sharded or replicated, and ZeRO's stages as placements.

One axis: the group is sharded over all ranks. Two axes, hybrid sharding (HSDP): the inner axis
shards, and the outer one has replicas of the same shards. Four ranks as 2 x 2::

                        inner 0      inner 1
    outer 0 (replica)   shard 0      shard 1      all-gathers and reduce-scatters along a row,
    outer 1 (replica)   shard 0      shard 1      then all-reduces of the shards along a column

The communicators of the axes are made once, and shared by all models on the mesh.

What is sharded over which axis, and when, is a row of `vescale_fsdp.program.zero_table`.
Without ``sharding`` it is zero3 on one axis, and hsdp on two, as in FSDP2.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat
from vescale_fsdp.backends import backend_name, spelling_of
from vescale_fsdp.dbuffer import Comm, choose_reduction, let_ranks_go_first
from vescale_fsdp.program import ZERO_TABLE, Kept, Row
from vescale_fsdp.ranks import collectives


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh that shard and replicate a group of parameters."""

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
        """Make axes of a mesh: the last one shards; the first of two replicates."""
        return cls(mesh, mesh.ndim - 1, 0 if mesh.ndim == 2 else None)

    @classmethod
    def named(cls, whole: DeviceMesh, shard: Sequence[str], replicate: Sequence[str]) -> Axes:
        """Make axes of a larger mesh, by name. Several names are flattened into one axis."""
        parts = [_part(whole, names) for names in (replicate, shard) if names]
        mesh = parts[0] if len(parts) == 1 else compat.concatenate_meshes(parts)
        cut = mesh.ndim - 1 if shard else None
        return cls(mesh, cut, 0 if replicate else None, whole, (*replicate, *shard))

    def as_in(self, row: Row) -> Axes:
        """Return these axes for a row of the table of ZeRO's stages."""
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
        """This rank's index along the axis that shards."""
        return self._place(self.shard)

    @cached_property
    def replica(self) -> int:
        """This rank's index along the axis that replicates."""
        return self._place(self.replicate)

    @property
    def num_axes(self) -> int:
        """One, or two if there is an axis that replicates."""
        return 1 if self.shard is None or self.replicate is None else 2

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else int(self.mesh.size(self.shard))

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicate is None else int(self.mesh.size(self.replicate))

    @cached_property
    def shard_ranks(self) -> tuple[int, ...]:
        """The global ranks of this rank's replica."""
        if self.shard is None:
            return (dist.get_rank(),)
        return tuple(collectives.axis_ranks(self.mesh, self.shard))

    @cached_property
    def replica_ranks(self) -> tuple[int, ...]:
        """The global ranks that have the same shard as this rank."""
        if self.replicate is None:
            return (dist.get_rank(),)
        return tuple(collectives.axis_ranks(self.mesh, self.replicate))

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The mesh's own process groups: of the shards, then of the replicas."""
        axes = [axis for axis in (self.shard, self.replicate) if axis is not None]
        return [collectives.mesh_group(self.mesh, axis) for axis in axes]

    @property
    def ranks(self) -> list[int]:
        """All global ranks of these axes, ascending."""
        return sorted(self.mesh.mesh.flatten().tolist())

    def __repr__(self) -> str:
        """Return a text that is the same on all of `ranks`."""
        used = f"sharded over axis {self.shard}, replicated over {self.replicate}"
        return f"a mesh of ranks {self.mesh.mesh.tolist()}, {used}"

    # What rests, between steps

    @property
    def resting_rank(self) -> int:
        """This rank's index among all ranks that shard the sharded parameters.

        With ``hsdp_zero1`` the ranks of one inner shard are adjacent.
        """
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
        return collectives.mesh_over(inner_first.flatten().tolist(), self.mesh)

    def joined(self, inner: DeviceMesh, fqn: str) -> DeviceMesh:
        """Return a mesh of these axes, followed by those of ``inner``, that of a parameter.

        Raises:
            ValueError: the two are not slices of one mesh, or have ranks in common.
        """
        if inner not in self._joined:
            both = {*self.mesh.mesh.flatten().tolist()} & {*inner.mesh.flatten().tolist()}
            if len(both) > 1:  # parts of one mesh have this rank in common
                raise ValueError(
                    f"fully_shard: parameter {fqn!r} is a DTensor on {inner} already, and would be "
                    f"sharded over the same ranks {sorted(both)}. If torch.distributed.fsdp."
                    "fully_shard has sharded it, use vescale_fsdp.fully_shard for the whole model, "
                    "with the same arguments; for tensor parallelism make one mesh of all axes and "
                    'pass its parts, mesh["data"] and mesh["tensor"]'
                )
            try:
                self._joined[inner] = compat.concatenate_meshes([self.mesh, inner])
            except (RuntimeError, TypeError) as error:  # TypeError: an axis has no name
                raise ValueError(
                    f"fully_shard: {self.mesh} and the mesh of the DTensor parameter {fqn!r}, "
                    f"{inner}, are not parts of one mesh with names; make one mesh of all axes and "
                    'pass its parts, mesh["data"] and mesh["tensor"]'
                ) from error
        return self._joined[inner]

    def placements(self, sharded: Placement) -> tuple[Placement, ...]:
        """Return a placement for each axis of `resting_mesh`: ``sharded`` or ``Replicate``."""
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


# Of each default group, by the ranks of the axes and their backends. They go when torch.distributed
# is ended: a gloo group has a thread that wakes a hundred times a second.
_COMMS: WeakKeyDictionary[object, dict[tuple[object, ...], Comm]] = WeakKeyDictionary()
atexit.register(_COMMS.clear)  # gloo does not like to be taken down by the interpreter


def comm_for(axes: Axes) -> Comm:
    """Return the communicators of these axes. Collective over the axes at the first call."""
    of_shards, of_replicas = axes.groups[0], axes.groups[-1]
    device = axes.mesh.device_type
    spellings = (device, spelling_of(of_shards), spelling_of(of_replicas))
    key = (axes.shard_ranks, axes.replica_ranks, spellings)
    comms = _COMMS.setdefault(dist.group.WORLD, {})
    comm = comms.get(key)
    if comm is None:
        has_replicas = axes.num_replicas > 1
        comm = Comm(
            gather_group=collectives.new_group(list(axes.shard_ranks), of_shards),
            reduce_group=collectives.new_group(list(axes.shard_ranks), of_shards),
            rank=axes.rank,
            size=axes.num_shards,
            reduction=choose_reduction(backend_name(of_shards, device)),
            replica_group=(
                collectives.new_group(list(axes.replica_ranks), of_replicas)
                if has_replicas
                else None
            ),
            num_replicas=axes.num_replicas,
            replica=axes.replica,
        )
        let_ranks_go_first()
        comms[key] = comm
    return comm


_DEFAULTS = {1: "zero3", 2: "hsdp"}  # by the number of axes: FSDP2's


def row_of(
    sharding: str | None,
    num_axes: int,
    accumulate: str | None,
    reshard_after_forward: bool | int | None,
) -> Row:
    """Return the row for the arguments of ``fully_shard``.

    Raises:
        ValueError: there is no such row, it needs another number of axes, or the other two
            arguments contradict it.
    """
    if sharding is None:
        sharding = _DEFAULTS[num_axes]
    if sharding not in ZERO_TABLE:
        raise ValueError(
            f"fully_shard: sharding must be one of {', '.join(ZERO_TABLE)}, got {sharding!r}"
        )
    row = ZERO_TABLE[sharding]
    if row.num_axes != num_axes:
        names = " and ".join(n for n, r in ZERO_TABLE.items() if r.num_axes == num_axes)
        raise ValueError(
            f"fully_shard: sharding={sharding!r} is for a mesh of {row.num_axes} axes, got "
            f"{num_axes}; for that there are {names}"
        )
    if reshard_after_forward and not row.cuts_parameters:
        raise ValueError(
            f"fully_shard: sharding={sharding!r} keeps parameters after forward; leave out "
            f"reshard_after_forward={reshard_after_forward}, or use 'zero3'"
        )
    if accumulate is None:
        return row
    if accumulate not in ("unsharded", "sharded"):
        raise ValueError(
            f"fully_shard: accumulate must be 'unsharded' or 'sharded', got {accumulate!r}"
        )
    if (accumulate == "sharded") == row.cuts_gradients:
        return row
    if not row.cuts_parameters:  # another row has what is asked for
        other = {"zero1": "use sharding='zero2'", "zero2": "use sharding='zero1'"}
        raise ValueError(
            f"fully_shard: sharding={sharding!r} does not accumulate {accumulate} gradients; "
            + other.get(sharding, "nothing is sharded there")
        )
    return replace(row, gradients=(*row.gradients[:-1], Kept.CUT))
