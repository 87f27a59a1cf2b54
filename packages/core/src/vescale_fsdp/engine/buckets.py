"""Buckets of `stream_parameters`: whole parameters in one uneven all-gather.

A bucket has consecutive parameters that are sharded over the same ranks. Each rank sends its shards
of them, one after the other and in the requested dtype, in one uneven all-gather. Nothing is
padded. Between two steps of the stream, a rank holds::

    its shards | bucket k, as received | bucket k + 1, under way | the last tensor that was yielded
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale_fsdp import compat
from vescale_fsdp.backends import backend_name, collective_device
from vescale_fsdp.dbuffer import Exchange
from vescale_fsdp.ragged import (
    Box,
    RaggedShard,
    as_bytes,
    group_along,
    holding_of,
    ragged_axis_of,
)
from vescale_fsdp.ranks import collectives, notes

_ALIGNMENT = 16  # bytes, of the part that each rank sends

To = Literal["all", "cpu"] | int


@dataclass(eq=False)
class Source:
    """A parameter, and the parts of it that the ranks have."""

    name: str
    param: Tensor  # without gradients; a DTensor, or plain
    dtype: torch.dtype  # to send
    parts: list[list[Box]] = field(default_factory=list)  # by the rank of the group that has them

    @cached_property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self.param.shape

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of the whole parameter in the dtype that is sent."""
        return self.shape.numel() * self.dtype.itemsize

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes of the mesh over which the parameter is sharded."""
        if not isinstance(self.param, DTensor) or not self.shape.numel():
            return ()
        each = enumerate(self.param.placements)
        return tuple(axis for axis, placement in each if not placement.is_replicate())

    @cached_property
    def route(self) -> object:
        """A key that is equal for parameters that may share a collective.

        It is None if the parameter needs no collective.
        """
        if not isinstance(self.param, DTensor):
            return None
        is_plain = type(compat.local_tensor(self.param)) is Tensor
        for placement in self.param.placements:
            known = isinstance(placement, RaggedShard | Replicate) or type(placement) is Shard
            is_plain = is_plain and known
        if not is_plain:
            return self  # it shares no collective, and is gathered by ``full_tensor``
        return (self.param.device_mesh, self.axes) if self.axes else None

    @cached_property
    def is_flat(self) -> bool:
        """Whether each rank has a range of the flattened parameter."""
        if not isinstance(self.param, DTensor):
            return False
        ragged = ragged_axis_of(self.param.placements)
        return ragged is not None and self.axes == (ragged,)

    def lay_out(self, members: Sequence[tuple[int, ...]]) -> None:
        """Set `parts`, for the ranks at these coordinates of the mesh."""
        param = self.param
        assert isinstance(param, DTensor)
        if self.is_flat:
            (axis,) = self.axes
            placement = param.placements[axis]
            assert isinstance(placement, RaggedShard)
            ranges = [placement.local_range(self.shape, member[axis]) for member in members]
            self.parts = [[Box((start,), (stop - start,), 0)] for start, stop in ranges]
        else:
            shape, placements = param.device_mesh.shape, param.placements
            self.parts = [holding_of(self.shape, placements, shape, each).boxes for each in members]

    def places(self, whole: Tensor, rank: int) -> list[Tensor]:
        """The views of a rank's parts in the whole tensor."""
        target = whole.view(-1) if self.is_flat else whole
        return [box.of(target) for box in self.parts[rank]]

    def own(self, device: torch.device) -> Tensor:
        """The elements of this rank, flat, on the device and in the dtype to send."""
        local = compat.local_tensor(self.param) if isinstance(self.param, DTensor) else self.param
        return local.reshape(-1).to(device, self.dtype)

    def num_bytes_of(self, rank: int) -> int:
        """The bytes that a rank of the group sends."""
        return sum(math.prod(box.sizes) for box in self.parts[rank]) * self.dtype.itemsize


@dataclass(eq=False)
class Output:
    """A tensor of the stream: one parameter, or several that are concatenated along dimension 0."""

    names: list[str]
    sources: list[Source]

    @cached_property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        first, *others = (source.shape for source in self.sources)
        if not others:
            return first
        return torch.Size([first[0] + sum(shape[0] for shape in others), *first[1:]])

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of the tensor in the dtype that is sent."""
        return sum(source.num_bytes for source in self.sources)

    @cached_property
    def route(self) -> object:
        """The route of its sources; self if they cannot share a collective."""
        routes = {source.route for source in self.sources}
        return routes.pop() if len(routes) == 1 else self

    @cached_property
    def is_alone(self) -> bool:
        """Whether each of its parameters is gathered by ``full_tensor``."""
        return isinstance(self.route, Source | Output)


class Bucket:
    """Outputs whose parameters are sent in one collective.

    Memory: none before `start`. From then on the parts of all ranks, until the caller has taken the
    last tensor.
    """

    def __init__(self, outputs: list[Output], to: To) -> None:
        self.outputs = outputs
        self._receiver = to if isinstance(to, int) and dist.is_initialized() else None
        self._work: Any = None
        self._parts: list[Tensor] = []  # bytes, by the rank of the group that sent them
        self._starts: dict[Source, list[int]] = {}  # in each part
        self._whole: Tensor | None = None  # the only output, if it can be received in place

    @property
    def is_receiver(self) -> bool:
        """Whether this rank gets the tensors."""
        return self._receiver is None or self._receiver == dist.get_rank()

    @torch.no_grad()
    def start(self) -> None:
        """Issue the collective. Does not wait."""
        found = (source for output in self.outputs for source in output.sources if source.axes)
        sources = [*dict.fromkeys(found)]
        if not sources or self.outputs[0].is_alone:
            return
        # Wide dtypes first, so that each part is aligned for its dtype.
        sources.sort(key=lambda source: -source.dtype.itemsize)
        spec = sources[0].param._spec  # type: ignore[attr-defined]
        group, members = group_along(spec, sources[0].axes)
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        if self._receiver is not None and self._receiver not in ranks:
            return  # the receiver is in another replica
        sizes = [0] * len(members)
        for source in sources:
            source.lay_out(members)
            self._starts[source] = list(sizes)
            sizes = [size + source.num_bytes_of(k) for k, size in enumerate(sizes)]
        local = compat.local_tensor(sources[0].param)
        device = collective_device(group, local.device)
        if self.is_receiver:
            self._parts = self._memory(sources, sizes, device)
            mine = self._parts[rank]
        else:
            mine = torch.empty(sizes[rank], dtype=torch.uint8, device=device)
        for source in sources:
            begin = self._starts[source][rank]
            part = mine[begin : begin + source.num_bytes_of(rank)]
            part.view(source.dtype).copy_(source.own(device))
        if self._receiver is None:
            self._work = _all_gather(self._parts, mine, group)
        else:
            self._work = _gather(self._parts, mine, ranks.index(self._receiver), group)

    def _memory(
        self, sources: list[Source], sizes: list[int], device: torch.device
    ) -> list[Tensor]:
        """Allocate the memory that receives the parts of all ranks."""
        first = sources[0]
        if len(self.outputs) == len(self.outputs[0].sources) == 1 and first.is_flat:
            self._whole = torch.empty(first.shape, dtype=first.dtype, device=device)
            return [as_bytes(first.places(self._whole, rank)[0]) for rank in range(len(sizes))]
        aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        parts = torch.empty(sum(aligned), dtype=torch.uint8, device=device).split(aligned)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def wait(self) -> None:
        """Wait for the collective."""
        work, self._work = self._work, None
        if work is not None:
            with notes.Named("the parameters of stream_parameters"):
                work.wait()

    def tensors(self, to: To) -> Iterator[tuple[str, Tensor | None]]:
        """The names and tensors that the stream yields."""
        for output in self.outputs:
            tensor = self._tensor(output)
            if tensor is not None and to == "cpu":
                tensor = tensor.cpu()
            for name in output.names:
                yield name, tensor
            del tensor  # the next one is made while the caller still holds this one
        self._parts, self._starts = [], {}

    @torch.no_grad()
    def _tensor(self, output: Output) -> Tensor | None:
        if output.is_alone:
            wholes = [_full(source) for source in output.sources]
            return torch.cat(wholes) if self.is_receiver else None
        if not self.is_receiver:
            return None
        if self._whole is not None:
            whole, self._whole = self._whole, None
            return whole
        first = output.sources[0]
        device = self._parts[0].device if self._parts else first.param.device
        whole = torch.empty(output.shape, dtype=first.dtype, device=device)
        rows = [source.shape[0] if source.shape else 1 for source in output.sources]
        places = whole.split(rows) if len(rows) > 1 else [whole]
        for place, source in zip(places, output.sources, strict=True):
            self._fill(place, source)
        return whole

    def _fill(self, place: Tensor, source: Source) -> None:
        if source not in self._starts:  # this rank has all of it
            place.copy_(source.own(place.device).view(source.shape))
            return
        starts = self._starts[source]
        for rank, (start, part) in enumerate(zip(starts, self._parts, strict=True)):
            values = part[start : start + source.num_bytes_of(rank)].view(source.dtype)
            for box, view in zip(source.parts[rank], source.places(place, rank), strict=True):
                view.copy_(box.in_local(values))


def _full(source: Source) -> Tensor:
    """The whole parameter, gathered by a collective of its own."""
    full = source.param.full_tensor() if isinstance(source.param, DTensor) else source.param
    return full.to(source.dtype)


def _all_gather(parts: list[Tensor], mine: Tensor, group: dist.ProcessGroup) -> Any:
    """Start the uneven all-gather of the ranks' parts. ``mine`` is this rank's part."""
    if len(parts) == 1:
        return None
    if backend_name(group, mine.device) == "gloo":
        return Exchange([mine] * len(parts), parts, dist.get_rank(group), group)
    return collectives.all_gather_uneven(parts, mine, group)


def _gather(parts: list[Tensor], mine: Tensor, receiver: int, group: dist.ProcessGroup) -> Any:
    """Start the uneven gather of the ranks' parts to one rank. ``mine`` is this rank's part."""
    size, rank, nothing = dist.get_world_size(group), dist.get_rank(group), mine[:0]
    if size == 1:
        return None
    if backend_name(group, mine.device) == "gloo":
        sent = [mine if rank != receiver == peer else nothing for peer in range(size)]
        return Exchange(sent, parts or [nothing] * size, rank, group)
    return collectives.gather_uneven(parts, mine, receiver, group)


def make_buckets(outputs: list[Output], bucket_bytes: int, to: To) -> list[Bucket]:
    """Divide the outputs into buckets of consecutive ones that have the same route.

    The bytes of a bucket and of its largest output together are at most ``bucket_bytes``, unless
    the bucket has one output only.
    """
    buckets: list[list[Output]] = []
    total = largest = 0
    for output in outputs:
        size, largest_then = output.num_bytes, max(largest, output.num_bytes)
        is_new = (
            not buckets
            or output.route != buckets[-1][-1].route
            or total + size + largest_then > bucket_bytes
        )
        if is_new:
            buckets.append([])
            total, largest_then = 0, size
        buckets[-1].append(output)
        total, largest = total + size, largest_then
    return [Bucket(each, to) for each in buckets]
