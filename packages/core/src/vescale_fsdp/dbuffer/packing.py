"""Packing: the layout of a gradient buffer without space for frozen parameters.

The layout of parameters does not depend on which are frozen. Example with three tensors on two
ranks, b is frozen::

                   0               S               2S
    parameters     | a a a a a b b | b b b c c c c |
                   0           S'          2S'
    gradients      | a a a a a . | c c c c . . |            `.` is a gap, and zero

The section of a rank has that rank's elements of the other tensors, in order and from its start. So
a tensor that is split may have several stretches in the buffer; blocks are not split. If nothing is
frozen, or if nothing is saved, gradients have the layout of their parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch

from vescale_fsdp.planner import ShardLayout, TensorSpec

T = TypeVar("T")


class Stretch(NamedTuple):
    """Elements ``[start, stop)`` of a tensor. ``place`` is their offset in the buffer."""

    start: int
    stop: int
    place: int


class Packing:
    """A layout of some tensors of another layout.

    Args:
        source: the layout of all tensors.
        wanted: for each spec whether it is in this layout. Default: all.

    Attributes:
        layout: of the buffer. Its specs are those of ``source``, or pieces of them.
        wanted: the argument.

    It is the same on all ranks. Memory: a few numbers for each tensor and each rank.
    """

    def __init__(self, source: ShardLayout, wanted: Sequence[bool] | None = None) -> None:
        self.source = self.layout = source
        self.wanted = (True,) * len(source.specs) if wanted is None else tuple(wanted)
        self._owners = list(range(len(source.specs)))  # the tensors that the layout's specs are of
        self._cuts: dict[int, tuple[list[int], list[int]]] = {}  # of a rank's shard
        if not all(self.wanted):
            self._pack()

    def _pack(self) -> None:
        source = self.source
        sections: list[list[tuple[int, int, int]]] = [[] for _ in range(source.num_shards)]
        for index in source.order:
            if self.wanted[index]:
                for rank, start, stop in source.shard_ranges(index):
                    sections[rank].append((index, start, stop))
        starts: list[list[int]] = []
        size = 0
        for section in sections:
            place, places = 0, []
            for _, start, stop in section:
                places.append(place)
                place += -(-(stop - start) // source.alignment) * source.alignment
            starts.append(places)
            size = max(size, place)
        if size >= source.shard_size:
            return
        specs: list[TensorSpec] = []
        offsets: list[int] = []
        owners: list[int] = []
        for rank, (section, places) in enumerate(zip(sections, starts, strict=True)):
            for (index, start, stop), place in zip(section, places, strict=True):
                name = f"{source.specs[index].name}[{start}:{stop}]"
                specs.append(TensorSpec(name, (stop - start,), stop - start))
                offsets.append(rank * size + place)
                owners.append(index)
        self._owners = owners
        self.layout = ShardLayout(
            specs=tuple(specs),
            num_shards=source.num_shards,
            alignment=source.alignment,
            shard_size=size,
            offsets=tuple(offsets),
            order=tuple(range(len(specs))),
            exact=False,
        )

    @property
    def is_whole(self) -> bool:
        """Whether gradients have the layout of their parameters."""
        return self.layout is self.source

    def of_layout(self, values: Sequence[T]) -> list[T]:
        """Convert a list with a value per tensor to a list with a value per spec of the layout."""
        return [values[index] for index in self._owners]

    @cached_property
    def stretches(self) -> list[list[Stretch]]:
        """The stretches of each tensor in the buffer, in order; empty for one that is left out."""
        if self.is_whole:
            places = zip(self.source.specs, self.source.offsets, strict=True)
            return [[Stretch(0, spec.numel, place)] for spec, place in places]
        found: list[list[Stretch]] = [[] for _ in self.source.specs]
        for index, place, spec in zip(
            self._owners, self.layout.offsets, self.layout.specs, strict=True
        ):
            own = found[index]
            start = own[-1].stop if own else 0
            if own and own[-1].place + own[-1].stop - own[-1].start == place:
                own[-1] = own[-1]._replace(stop=start + spec.numel)
            else:
                own.append(Stretch(start, start + spec.numel, place))
        for own, has_place in zip(found, self.wanted, strict=True):
            if has_place and not own:  # without elements
                own.append(Stretch(0, 0, 0))
        return found

    @cached_property
    def first_places(self) -> list[int]:
        """The first offset of each tensor in the buffer; 0 for one that is left out."""
        return [own[0].place if own else 0 for own in self.stretches]

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Start and stop of the gaps between tensors, in order."""
        found, position = [], 0
        pairs = zip(self.layout.offsets, self.layout.specs, strict=True)
        for start, numel in sorted((start, spec.numel) for start, spec in pairs if spec.numel):
            if start > position:
                found.append((position, start))
            position = start + numel
        if position < self.layout.total_size:
            found.append((position, self.layout.total_size))
        return found

    def shard_views(self, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return ``rank``'s part of each tensor as a flat view. They share a version counter."""
        if rank not in self._cuts:
            self._cuts[rank] = self._cuts_of(rank)
        sizes, places = self._cuts[rank]
        parts = shard.split_with_sizes(sizes)  # a call for each would take four times as long
        return [parts[place] for place in places]

    def _cuts_of(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the sizes of consecutive parts of a shard, and the index of each tensor's part."""
        layout = self.layout
        found = []
        for piece, owner in enumerate(self._owners):
            start, stop = layout.local_range(piece, rank)
            if stop > start:
                place = layout.offsets[piece] + start - rank * layout.shard_size
                found.append((place, stop - start, owner))
        sizes, end = [0], 0  # first is what the rank has of the other tensors: nothing
        places = [0] * len(self.source.specs)
        for place, size, owner in sorted(found):
            places[owner] = len(sizes) + 1
            sizes += place - end, size
            end = place + size
        return [*sizes, layout.shard_size - end], places

    def moved(self, flat: torch.Tensor, former: Packing, ranks: Sequence[int]) -> torch.Tensor:
        """Copy the sections of ``ranks`` from a buffer with the packing ``former`` to this packing.

        Tensors that were left out are zero. Cost: a copy of each part of a tensor.
        """
        size, former_size = self.layout.shard_size, former.layout.shard_size
        result = torch.zeros(len(ranks) * size, dtype=flat.dtype, device=flat.device)
        for section, rank in enumerate(ranks):
            sources = former.shard_views(flat.narrow(0, section * former_size, former_size), rank)
            targets = self.shard_views(result.narrow(0, section * size, size), rank)
            for index, source in enumerate(sources):
                if self.wanted[index] and former.wanted[index]:
                    targets[index].copy_(source)
        return result
