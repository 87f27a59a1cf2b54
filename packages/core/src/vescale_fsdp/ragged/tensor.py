"""RaggedTensor: a DTensor whose placement is a RaggedShard along one axis of the mesh.

The local tensor is the flat (1-D) part of the storage that this rank holds: a view of the
group's shard buffer, so an optimizer's in-place step works on the buffer itself. It is flat on
purpose: a matrix optimizer that takes ``to_local()`` for a matrix fails loudly.

A plain ``DTensor`` must never carry a RaggedShard: its dispatch runs in C++ and would treat the
placement as replicated. This subclass has its own ``__torch_dispatch__`` (file `dispatch`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat
from vescale_fsdp.compat import DTensorSpec, TensorMeta
from vescale_fsdp.ragged.placement import RaggedShard
from vescale_fsdp.ragged.regions import Box, contiguous_strides, flat_range_to_boxes

__all__ = ["RaggedTensor"]


class RaggedTensor(DTensor):
    """A tensor of which this rank holds a flat range, as its ``RaggedShard`` says.

    Invariants: exactly one RaggedShard among the placements and ``Replicate`` elsewhere; the
    local tensor is 1-D and has the length of ``local_range``; the global tensor is contiguous.

    Pointwise, in-place, ``foreach`` and ``fused`` operators run on the local part without
    communication. Norms give a partial DTensor. Everything else raises and names the way out.
    """

    __slots__: list[str] = []

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types only its stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from vescale_fsdp.ragged.dispatch import dispatch

        return dispatch(func, args, kwargs or {})

    if compat.DTENSOR_SUBCLASSES_NEED_A_MODE:

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            from vescale_fsdp.ragged.dispatch import dispatch

            mode = compat.DispatchMode(RaggedTensor, dispatch)
            return compat.call_in_mode(mode, func, args, kwargs)

    @staticmethod
    def from_local(  # type: ignore[override]  # the shape cannot be guessed from one rank
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int],
    ) -> RaggedTensor:
        """Wrap this rank's flat part of a tensor of global ``shape``. No communication, no copy.

        Raises:
            ValueError: the part does not have the length that the placement gives this rank,
                or the placements are not one RaggedShard and otherwise ``Replicate``.
        """
        spec = make_spec(device_mesh, placements, shape, local_tensor.dtype)
        start, stop = _local_range(spec)
        if local_tensor.dim() != 1 or local_tensor.numel() != stop - start:
            raise ValueError(
                f"{spec.placements} gives this rank {stop - start} elements of a tensor of shape "
                f"{tuple(shape)}, but the local tensor has shape {tuple(local_tensor.shape)}; "
                "pass the flat part with that many elements"
            )
        return wrap_local(local_tensor.detach(), spec, local_tensor.requires_grad)

    @staticmethod
    def distribute(
        full_tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> RaggedTensor:
        """Keep this rank's part of a full tensor that every rank holds. A local copy only."""
        spec = make_spec(device_mesh, placements, full_tensor.shape, full_tensor.dtype)
        start, stop = _local_range(spec)
        return wrap_local(full_tensor.detach().reshape(-1)[start:stop].clone(), spec, False)

    @property
    def ragged_axis(self) -> int:
        """The mesh axis that carries the RaggedShard."""
        return _ragged_axis(self._spec.placements)

    @property
    def ragged_placement(self) -> RaggedShard:
        """The RaggedShard among the placements."""
        return cast(RaggedShard, self._spec.placements[self.ragged_axis])

    @property
    def local_range(self) -> tuple[int, int]:
        """The half-open flat range of the global tensor that this rank holds, in elements."""
        return _local_range(self._spec)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's flat part. Differentiable; the gradient comes back with this placement."""
        if not torch.is_grad_enabled() or not self.requires_grad:
            return self._local_tensor
        return cast(torch.Tensor, _ToLocal.apply(self))  # type: ignore[no-untyped-call]

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor on every rank. Differentiable (the gradient is cut locally).

        Cost: one even all-gather of ``num_shards`` times the largest local part.
        """
        return cast(torch.Tensor, _FullTensor.apply(self))  # type: ignore[no-untyped-call]

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Change the placements: to the same ones, or to ``Replicate`` on every axis.

        Other targets are not there yet and raise; ``full_tensor()`` reaches all of them.
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError(
                f"RaggedTensor.redistribute to another mesh ({device_mesh}) is not there yet; "
                "use full_tensor() and distribute the result"
            )
        if placements is None or tuple(placements) == self._spec.placements:
            return self
        if all(placement.is_replicate() for placement in placements):
            return DTensor.from_local(
                self.full_tensor(), self.device_mesh, list(placements), run_check=False
            )
        raise NotImplementedError(
            f"RaggedTensor.redistribute from {self._spec.placements} to {tuple(placements)} is "
            "not there yet; use full_tensor() and distribute the result"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedTensor:
        copied = wrap_local(self._local_tensor.detach().clone(), self._spec, self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True  # how torch marks subclasses
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The parts of one shard share memory: without the copy each would be saved with all.
        is_param = isinstance(self, torch.nn.Parameter)
        local = self._local_tensor.detach().clone()
        return _rebuild, (local, self._spec, self.requires_grad, is_param)

    def __repr__(self) -> str:  # type: ignore[override]
        start, stop = self.local_range
        return (
            f"RaggedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"placements={self._spec.placements}, local=[{start}, {stop}) "
            f"{self._local_tensor})"
        )

    # Distributed checkpoint's protocol. It knows boxes; a flat range is up to 2*ndim-1 of them.

    def _boxes(self) -> list[Box]:
        if self.numel() == 0:  # nobody holds an element: the first rank names the entry
            first = self.device_mesh.get_local_rank(self.ragged_axis) == 0
            return [Box((0,) * self.dim(), tuple(self.shape), 0)] if first else []
        return flat_range_to_boxes(self.shape, *self.local_range)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box in self._boxes():
            if index.offset is not None and tuple(index.offset) == box.offsets:
                numel = math.prod(box.sizes)
                return self._local_tensor.detach()[box.start : box.start + numel].view(box.sizes)
        raise ValueError(
            f"checkpoint entry {index.fqn!r} has a chunk at {index.offset}, but this rank holds "
            f"{[box.offsets for box in self._boxes()]}"
        )


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """The DTensor spec of a contiguous tensor with one RaggedShard, checked against its shape."""
    placements = tuple(placements)
    ragged = [axis for axis, p in enumerate(placements) if isinstance(p, RaggedShard)]
    others = [p for p in placements if not isinstance(p, RaggedShard | Replicate)]
    if len(placements) != mesh.ndim or len(ragged) != 1 or others:
        raise ValueError(
            f"a RaggedTensor needs one RaggedShard and otherwise Replicate, one placement per "
            f"axis of the mesh; got {placements} for a mesh of {mesh.ndim} axes"
        )
    placement = cast(RaggedShard, placements[ragged[0]])
    if placement.num_shards != mesh.size(ragged[0]):
        raise ValueError(
            f"{placement} is for {placement.num_shards} ranks, but axis {ragged[0]} of the mesh "
            f"has {mesh.size(ragged[0])}"
        )
    placement.unit_numel(shape)
    shape = torch.Size(shape)
    return DTensorSpec(mesh, placements, TensorMeta(shape, contiguous_strides(shape), dtype))


def wrap_local(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> RaggedTensor:
    """A RaggedTensor around ``local``, unchecked. Several tensors may share one spec."""
    return RaggedTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]


def _rebuild(
    local: torch.Tensor, spec: DTensorSpec, requires_grad: bool, is_param: bool
) -> RaggedTensor:
    """What ``torch.load`` and ``pickle`` call."""
    tensor = wrap_local(local, spec, requires_grad)
    if is_param:
        tensor._is_param = True  # how torch marks subclasses
    return tensor


def _ragged_axis(placements: Sequence[Placement]) -> int:
    return next(axis for axis, p in enumerate(placements) if isinstance(p, RaggedShard))


def _local_range(spec: DTensorSpec) -> tuple[int, int]:
    axis = _ragged_axis(spec.placements)
    placement = cast(RaggedShard, spec.placements[axis])
    return placement.local_range(spec.shape, spec.mesh.get_local_rank(axis))


class _ToLocal(torch.autograd.Function):
    """RaggedTensor -> flat local part."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return wrap_local(grad.reshape(-1), ctx.spec, False)


class _FullTensor(torch.autograd.Function):
    """RaggedTensor -> the whole tensor, gathered from all ranks of the axis."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        return _gather_full(tensor._local_tensor, tensor._spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        start, stop = _local_range(ctx.spec)
        return wrap_local(grad.reshape(-1)[start:stop].clone(), ctx.spec, False)


def _gather_full(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    axis = _ragged_axis(spec.placements)
    placement = cast(RaggedShard, spec.placements[axis])
    num_shards = placement.num_shards
    ranges = [placement.local_range(spec.shape, rank) for rank in range(num_shards)]
    if num_shards == 1:
        return local.clone().view(spec.shape)
    longest = max(stop - start for start, stop in ranges)
    padded = local.new_zeros(longest)
    padded[: local.numel()].copy_(local)
    gathered = local.new_empty(num_shards * longest)
    group: dist.ProcessGroup = compat.mesh_group(spec.mesh, axis)
    compat.all_gather_single(gathered, padded, group).wait()
    parts = [
        gathered[rank * longest : rank * longest + stop - start]
        for rank, (start, stop) in enumerate(ranges)
    ]
    return torch.cat(parts).view(spec.shape)


# torch.optim goes by exact type; without this it would loop per tensor in silence.
compat.support_foreach(RaggedTensor)
