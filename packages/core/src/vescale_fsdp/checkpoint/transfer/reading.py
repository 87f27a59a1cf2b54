"""Reading a checkpoint's bytes: each is checked by one rank, and read by those that need it.

A rank checks every chunk that it reads whole, and those that are its share: with as many ranks as
have saved, the files that it would write itself; with another number, an even part of all bytes.
Chunks of its share that it needs are read once. Of others it reads the bytes that it needs only;
that they are sound is what another rank says when the ranks agree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from vescale_fsdp.checkpoint.disk.files import DataReader
from vescale_fsdp.checkpoint.disk.manifest import DTYPES, Chunk, Manifest, Span
from vescale_fsdp.checkpoint.disk.seal import data_name
from vescale_fsdp.checkpoint.state import tensors


@dataclass
class Arrival:
    """Elements that have arrived, and the place where they go."""

    name: str
    place: torch.Tensor
    value: torch.Tensor  # after `put` with ``keep``: what was there
    is_kept: bool = False

    def put(self, *, keep: bool) -> None:
        """Write the elements to their place; with ``keep`` hold on to those that were there."""
        with torch.no_grad():
            if keep and tensors.exchange(self.place.detach(), self.value):
                self.is_kept = True
                return
            value = self.value
            if keep:
                self.value, self.is_kept = tensors.on_host(self.place, copy=True), True
            self.place.copy_(value)

    def put_back(self) -> None:
        """Undo `put`, as far as it came. What was not kept stays as it is."""
        if self.is_kept:
            with torch.no_grad():
                self.place.copy_(self.value)


def shares(manifest: Manifest, rank: int, num_ranks: int) -> list[tuple[Span, str]]:
    """What a rank checks: spans with words for what they hold. All ranks together check all."""
    if num_ranks == manifest.world_size:
        own = {data_name(rank)}
        if rank == 0:
            own |= manifest.files.keys() - set(map(data_name, range(num_ranks)))
        return [(span, label) for span, label in manifest.spans() if span.file in own]
    mine, done = [], 0
    total = max(1, manifest.num_bytes)
    for span, label in sorted(manifest.spans(), key=lambda entry: (entry[0].file, entry[0].offset)):
        middle = done + span.length // 2
        if min(num_ranks - 1, middle * num_ranks // total) == rank:
            mine.append((span, label))
        done += span.length
    return mine


def read(
    reader: DataReader,
    manifest: Manifest,
    wanted: Mapping[str, torch.Tensor],
    rank: int,
    num_ranks: int,
) -> Iterator[Arrival]:
    """Check this rank's share, and read the elements that it has of the wanted tensors.

    Args:
        wanted: tensors by their names in the manifest, of the same shapes; not written to yet.

    Yields:
        What goes where, tensor by tensor: this rank's part of the wanted tensors.

    Raises:
        CheckpointCorruptError, CheckpointIncompleteError: as `DataReader.read` does.
    """
    parts = parts_of(manifest, wanted)
    mine = {span: label for span, label in shares(manifest, rank, num_ranks) if span.length}
    for span in sorted({*parts, *mine}, key=lambda span: (span.file, span.offset)):
        if span not in parts:
            reader.check(span, mine[span])
            continue
        name, chunk = parts[span][0].name, parts[span][0].chunk
        source = _Source(reader, name, manifest.tensors[name].dtype, chunk, is_mine=span in mine)
        for part in parts[span]:
            yield Arrival(name, part.place, source.box(part.offsets, part.lengths))
        del source  # before the next is read


@dataclass
class Part:
    """A box of a chunk, by offsets within it, and the place where it goes."""

    name: str
    chunk: Chunk
    offsets: torch.Size
    lengths: torch.Size
    place: torch.Tensor


def parts_of(manifest: Manifest, wanted: Mapping[str, torch.Tensor]) -> dict[Span, list[Part]]:
    """What this rank needs of each chunk to fill its elements of the wanted tensors."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(wanted), _metadata(manifest, wanted))
    parts: dict[Span, list[Part]] = defaultdict(list)
    for item in planner.create_local_plan().items:
        name, number = item.storage_index.fqn, item.storage_index.index
        assert number is not None, "the planner numbers chunks"
        if math.prod(item.lengths):
            chunk = manifest.tensors[name].chunks[number]
            place = planner.resolve_tensor(item)
            part = Part(name, chunk, item.storage_offsets, item.lengths, place)
            parts[chunk.span].append(part)
    return parts


class _Source:
    """Boxes of one chunk."""

    def __init__(
        self, reader: DataReader, name: str, dtype: str, chunk: Chunk, *, is_mine: bool
    ) -> None:
        self._reader, self._dtype, self._chunk = reader, DTYPES[dtype], chunk
        where = f" at {list(chunk.offsets)}" if any(chunk.offsets) else ""
        self._label = f"tensor {name!r}{where}"
        self._whole = self._read_whole() if is_mine else None

    def _read_whole(self) -> torch.Tensor:
        data = self._reader.read(self._chunk.span, self._label)
        return data.view(self._dtype).view(self._chunk.sizes)

    def box(self, offsets: torch.Size, lengths: torch.Size) -> torch.Tensor:
        """The elements of a box, given by offsets within the chunk."""
        if tuple(lengths) == self._chunk.sizes and self._whole is None:
            self._whole = self._read_whole()
        if self._whole is not None:
            if tuple(lengths) == self._chunk.sizes:
                return self._whole
            index = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            return self._whole[index].clone(memory_format=torch.contiguous_format)
        strides = torch.empty(self._chunk.sizes, device="meta").stride()
        first = sum(o * stride for o, stride in zip(offsets, strides, strict=True))
        count = 1 + sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))
        size = self._dtype.itemsize
        data = self._reader.read_part(self._chunk.span, first * size, count * size, self._label)
        # What the box leaves out of its rows is read, and dropped here.
        return data.view(self._dtype).as_strided(lengths, strides).contiguous()


def _metadata(manifest: Manifest, wanted: Mapping[str, torch.Tensor]) -> Metadata:
    entries = {name: manifest.tensors[name] for name in wanted}
    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[entry.dtype]),
                size=torch.Size(entry.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in entry.chunks
                ],
            )
            for name, entry in entries.items()
        }
    )
