"""Batches: blocks of several tensors as the rows of one matrix.

::

    w (cut: blocks 3 to 6)      | 3 | 4 | 5 |         one batch      w 3
    b (all of it)               | 0 | 1 |                            w 4
                                                                     w 5
                                                                     b 0
                                                                     b 1 0 0     its last block is
                                                                                 shorter: zeros

What happens in a row has the same bits in any batch. The rows of a single flat range of whole
blocks are a view of it; else they are copied there and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from vescale_fsdp.ragged import Blocks, Region


class Entry(NamedTuple):
    """Tensors of one shape that are cut alike, and their scales."""

    blocks: Blocks
    box: Sequence[int]  # what axes with a ``Shard`` leave of the tensor to this rank
    tensors: Mapping[str, torch.Tensor]  # flat: the local parts, or their scales


class _Part(NamedTuple):
    entry: Entry
    region: Region
    first: int  # of its blocks, among those of the local part


class Batch:
    """Some blocks of some entries. Names are those of the entries' tensors."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._sizes = [part.region.num_blocks for part in parts]
        self._width = parts[0].entry.blocks.numel
        # Whether all elements of a region follow each other, in whole blocks.
        self._is_flat = all(part.region.shape == (n * self._width,) for part, n in self._sized())
        self._views: dict[str, list[torch.Tensor]] = {}

    def _sized(self) -> Iterator[tuple[_Part, int]]:
        return zip(self._parts, self._sizes, strict=True)

    def rows(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The elements, [blocks, elements of a block]: a view if it can be one, or a copy."""
        views = self._views_of(name)
        shape = (sum(self._sizes), self._width)
        if self._is_flat:
            flat = views[0] if len(views) == 1 else torch.cat(views)
            return flat.to(dtype).view(shape)
        rows = torch.empty(shape, dtype=dtype, device=views[0].device)
        for part, view, into in zip(self._parts, views, rows.split(self._sizes), strict=True):
            part.entry.blocks.pack(view, into)
        return rows

    def put_rows(self, name: str, rows: torch.Tensor) -> None:
        """Copy rows back to where `rows` took them from, unless they are a view."""
        views = self._views_of(name)
        if not self._is_flat:
            for part, view, row in zip(self._parts, views, rows.split(self._sizes), strict=True):
                part.entry.blocks.unpack(row, view)
        elif views[0].data_ptr() != rows.data_ptr():
            flat = rows.view(-1).split([n * self._width for n in self._sizes])
            torch._foreach_copy_(views, list(flat))

    def scales(self, name: str) -> torch.Tensor:
        """The scales of the blocks, [blocks]."""
        found = self._scales_of(name)
        return found[0] if len(found) == 1 else torch.cat(found)

    def put_scales(self, name: str, scales: torch.Tensor) -> None:
        """Copy the scales of the blocks back."""
        torch._foreach_copy_(self._scales_of(name), list(scales.split(self._sizes)))

    def _views_of(self, name: str) -> list[torch.Tensor]:
        if name not in self._views:
            tensors = (part.entry.tensors[name] for part in self._parts)
            pairs = zip(self._parts, tensors, strict=True)
            self._views[name] = [part.region.of(tensor) for part, tensor in pairs]
        return self._views[name]

    def _scales_of(self, name: str) -> list[torch.Tensor]:
        found = [(part.entry.tensors[name], part.first, n) for part, n in self._sized()]
        return [each if n == len(each) else each.narrow(0, first, n) for each, first, n in found]


def batches(entries: Iterable[tuple[Entry, int]], at_most: int) -> Iterator[Batch]:
    """Batches over all blocks of entries, in order.

    Args:
        entries: with the number of elements of their local parts. Blocks have the same number of
            elements in all of them.
        at_most: elements of a batch, if a block or a row of tiles has not more.
    """
    parts: list[_Part] = []
    num_elements = 0
    for entry, numel in entries:
        first = 0
        for region in entry.blocks.regions(entry.box, numel, at_most):
            size = region.num_blocks * entry.blocks.numel
            if parts and num_elements + size > at_most:
                yield Batch(parts)
                parts, num_elements = [], 0
            parts.append(_Part(entry, region, first))
            num_elements += size
            first += region.num_blocks
    if parts:
        yield Batch(parts)
