"""What a step of Muon needs to know beforehand, made once for a set of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat
from vescale_fsdp.optim.base import local_of
from vescale_fsdp.optim.matrices.assignment import (
    Assignment,
    CommunicationPlan,
    Entry,
    assignments_of,
    communication_of,
)
from vescale_fsdp.optim.matrices.layout import layout_of
from vescale_fsdp.optim.matrices.routes import routes_of
from vescale_fsdp.optim.matrices.transport import Transport
from vescale_fsdp.optim.muon.newton_schulz import newton_schulz_cost

# Newton-Schulz begins with a cast to bf16 and ends in it: nothing is lost on the wire.
WIRE_DTYPE = torch.bfloat16


Sharded = tuple[DTensor, dict[str, Any]]  # a parameter, and the options of its group


def key_of(sharded: Sequence[Sharded]) -> tuple[Any, ...]:
    """What a plan depends on, but for the placements."""
    return tuple(
        (id(param), _frozen(group["split_rows"]), group["ns_steps"]) for param, group in sharded
    )


def _frozen(split_rows: Any) -> Any:
    return tuple(split_rows) if isinstance(split_rows, Sequence) else split_rows


class Plan:
    """The assignments of a set of parameters, and the transports that carry them out.

    Cost: tens of microseconds for each matrix, once; no communication, but for the first
    communicator over several axes of a mesh.
    """

    def __init__(self, sharded: Sequence[Sharded], bucket_bytes: int) -> None:
        self._params = [param for param, _ in sharded]
        self._specs = [param._spec for param in self._params]
        self._bucket_elements = max(1, bucket_bytes // WIRE_DTYPE.itemsize)
        entries = [
            Entry(
                layout=layout_of(param),
                split_rows=group["split_rows"],
                cost=partial(newton_schulz_cost, steps=group["ns_steps"]),
            )
            for param, group in sharded
        ]
        self.assignments = assignments_of(entries)

    def fits(self, sharded: Sequence[Sharded]) -> bool:
        """Whether the parameters still lie as they did."""
        return all(map(is_, (param._spec for param, _ in sharded), self._specs))

    @property
    def communication(self) -> CommunicationPlan:
        """What a step sends."""
        return communication_of(self.assignments, WIRE_DTYPE.itemsize, WIRE_DTYPE.itemsize)

    @cached_property
    def transports(self) -> list[Transport]:
        """One for each assignment. All ranks that share parameters come here in one order."""
        return [self._transport(each) for each in self.assignments]

    def _transport(self, assignment: Assignment) -> Transport:
        params = [self._params[index] for index in assignment.params]
        group = _group_of(params, assignment.members)
        order = dist.get_process_group_ranks(group) if group else assignment.members
        routes = routes_of(
            assignment.matrices,
            assignment.owners,
            assignment.costs,
            assignment.grids,
            order,
            dist.get_rank(),
            self._bucket_elements,
        )
        return Transport(
            assignment.matrices,
            routes,
            group,
            gather_dtype=WIRE_DTYPE,
            scatter_dtype=WIRE_DTYPE,
            device=_device_of(params[0]),
        )


def _group_of(params: Sequence[DTensor], members: Sequence[int]) -> dist.ProcessGroup | None:
    """The process group over the members: that of a mesh if one of them has it already."""
    if len(members) == 1:
        return None
    meshes = [param.device_mesh for param in params]
    group = compat.mesh_group(meshes[0], 0)
    mesh = next((mesh for mesh in meshes if mesh.ndim == 1), None)
    return compat.group_over(list(members), group) if mesh is None else compat.mesh_group(mesh, 0)


def _device_of(param: DTensor) -> torch.device:
    """Where matrices are computed: where messages arrive, also if parameters are kept on a CPU."""
    local, kind = local_of(param).device, param.device_mesh.device_type
    return local if local.type == kind else torch.device(kind)
