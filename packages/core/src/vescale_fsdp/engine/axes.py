"""Which axes of a mesh a group is sharded over, and which it is replicated over.

One axis: all ranks share the work of holding the parameters. Two axes, hybrid sharding (HSDP): the
inner axis shards, the outer one holds replicas of the same shards. Four ranks as 2 x 2::

                        inner 0      inner 1
    outer 0 (replica)   shard 0      shard 1      gathers and reduce-scatters along a row,
    outer 1 (replica)   shard 0      shard 1      then sums of the reduced shards along a column
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat

__all__ = ["Axes"]


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh by what they do for a group of parameters."""

    mesh: DeviceMesh
    shard: int  # the axis that shards
    replicate: int | None = None  # the axis that holds replicas, if there is one
    whole: DeviceMesh | None = (
        None  # with all axes of the job, if its parameters are DTensors on it
    )
    data_names: tuple[str, ...] = ()  # of the axes of ``whole`` that this class is about
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
        return cls(mesh, mesh.ndim - 1, 0 if replicate else None, whole, (*replicate, *shard))

    @property
    def inner_names(self) -> tuple[str, ...]:
        """The names of the other axes of ``whole``: of tensor parallelism and the like."""
        names = self.whole.mesh_dim_names if self.whole is not None else None
        return tuple(name for name in names or () if name not in self.data_names)

    @cached_property
    def rank(self) -> int:
        """Of the caller along the axis that shards."""
        coordinate = self.mesh.get_coordinate()  # the group's own ranks may be in another order
        assert coordinate is not None, "the caller is part of the mesh"
        return int(coordinate[self.shard])

    @property
    def num_shards(self) -> int:
        return int(self.mesh.size(self.shard))

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicate is None else int(self.mesh.size(self.replicate))

    @cached_property
    def shard_ranks(self) -> tuple[int, ...]:
        """The global ranks that hold one replica together, the caller among them."""
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
        axes = [self.shard] if self.replicate is None else [self.shard, self.replicate]
        return [compat.mesh_group(self.mesh, axis) for axis in axes]

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
        """One placement per axis of the mesh: ``sharded`` where it shards."""
        return tuple(
            sharded if axis == self.shard else Replicate() for axis in range(self.mesh.ndim)
        )


def _part(whole: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    if len(names) == 1:
        return whole[names[0]]
    flat: DeviceMesh = whole[tuple(names)]._flatten()
    return flat
