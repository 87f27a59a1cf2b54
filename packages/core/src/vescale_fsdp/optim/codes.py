"""Encodes blocks of numbers in 8 bits, and batches blocks of several tensors.

The scale of a block is its largest magnitude. A number x is stored as the index of the entry of a
map that is nearest to x / scale. The map is *dynamic*: it has seven decades below 1, each divided
evenly, the upper ones more finely::

    decade       [0.1, 1]    [0.01, 0.1]    [0.001, 0.01]    ...    [1e-7, 1e-6]
    entries        64           32              16                      1          signed: and as
    unsigned      128           64              32                      2          many below zero

An entry is the middle of its part of the decade. With 0 and 1 there are 256 entries.

Source: arXiv 1511.04561 (dynamic tree), arXiv 2110.02861 (8-bit optimizers, blocks). The maps are
those of bitsandbytes and torchao, except for the last bit of some entries. The encoding here always
finds the nearest entry; of two equally near ones the larger.

A batch has the blocks of several tensors as rows of one matrix. The result of a row does not depend
on the batch. If the rows are one flat range of complete blocks, they are a view of it; else they
are copied to the batch and back::

    w (shard: blocks 3 to 5)    | 3 | 4 | 5 |         one batch      w 3
    b (all of it)               | 0 | 1 |                            w 4
                                                                     w 5
                                                                     b 0
                                                                     b 1 0 0     the last block
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from vescale_fsdp.ragged import Blocks, Region

SMALLEST_SCALE = 1e-12
_NUM_DECADES = 7
_PREFIXES = 1 << 16  # values of the upper 16 bits of a float32


@lru_cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """Return the 256 entries, ascending: float32 numbers in [-1, 1], or in [0, 1] if unsigned."""
    entries = [Fraction(0), Fraction(1)]
    for decade in range(_NUM_DECADES):
        parts = 2 ** (decade + (0 if signed else 1))
        for part in range(parts):
            middle = Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * part + 1, 2 * parts)
            entry = middle / 10 ** (_NUM_DECADES - 1 - decade)
            entries += [entry, -entry] if signed else [entry]
    ascending = torch.tensor(sorted(map(float, entries)), dtype=torch.float64)
    return tuple(ascending.float().tolist())


class Codebook:
    """A map, with tables to find the nearest entry of many numbers.

    The upper 16 bits of a float32 define a range of numbers, and at most one midpoint between two
    entries is in this range. So a table of 65,536 codes, and one comparison with a midpoint, find
    the nearest entry. (A binary search takes ten times as long on a CPU.)

    Args:
        signed: for numbers of both signs; else for numbers that are not negative.
        device: of the numbers.
    """

    def __init__(self, signed: bool, device: torch.device) -> None:
        entries = dynamic_map(signed)
        cuts = torch.tensor([_midpoint(a, b) for a, b in pairwise(entries)])
        first, last = _ranges_of_prefixes()
        code = torch.bucketize(first, cuts, right=True)
        spread = torch.bucketize(last, cuts, right=True) - code
        assert int(spread.max()) <= 1, "one comparison decides"
        cut = torch.where(spread == 1, cuts[code.clamp(max=len(cuts) - 1)], math.inf)
        self._entries = torch.tensor(entries, device=device)
        self._code = code.to(torch.uint8).to(device)
        self._cut = cut.to(device)
        self.zero = entries.index(0.0)  # the code of 0

    def encode(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode ``numbers``, float32 [blocks, elements of a block].

        Returns:
            Codes, uint8 of the same shape, and scales, float32 [blocks]. The smallest scale is
            1e-12. A block with NaN or infinity is all NaN after `decode`.
        """
        scales = numbers.abs().amax(1).clamp_(min=SMALLEST_SCALE)
        scaled = numbers / scales[:, None]
        flat = scaled.view(-1)
        prefix = (flat.view(torch.int32) >> 16).bitwise_and_(_PREFIXES - 1)
        codes = self._code.index_select(0, prefix)
        codes += flat >= self._cut.index_select(0, prefix)
        return codes.view(numbers.shape), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Decode ``codes`` [blocks, elements] and ``scales`` [blocks] to numbers."""
        entries = self._entries.index_select(0, codes.reshape(-1).int())
        return entries.view(codes.shape).mul_(scales[:, None])


@lru_cache
def codebook(signed: bool, device: torch.device) -> Codebook:
    """Return the codebook on a device. It is made at the first call."""
    return Codebook(signed, device)


def _midpoint(below: float, above: float) -> float:
    """Return the smallest float32 that is not below the middle of two."""
    middle = (Fraction(below) + Fraction(above)) / 2
    rounded = torch.tensor(float(middle), dtype=torch.float64).float()
    if Fraction(rounded.item()) < middle:
        rounded = torch.nextafter(rounded, torch.tensor(math.inf))
    return rounded.item()


def _ranges_of_prefixes() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest float32 of each prefix; 0 for NaN and infinity."""
    bits = torch.arange(_PREFIXES, dtype=torch.int64) << 16
    bits = torch.where(bits < 2**31, bits, bits - 2**32)
    ends = torch.stack([bits, bits + _PREFIXES - 1]).int().view(torch.float32)
    ends[:, ~ends.isfinite().all(0)] = 0.0
    return ends.amin(0), ends.amax(0)


class Entry(NamedTuple):
    """Tensors of the same shape and placements, and their scales."""

    blocks: Blocks
    box: Sequence[int]  # the shape of this rank's part after axes with ``Shard``
    tensors: Mapping[str, torch.Tensor]  # the local parts or scales, flat


class _Part(NamedTuple):
    entry: Entry
    region: Region
    first: int  # index of its first block in the local part


class Batch:
    """Some blocks of several entries. Names are those in ``Entry.tensors``."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._sizes = [part.region.num_blocks for part in parts]
        self._width = parts[0].entry.blocks.numel
        # Whether the region is contiguous and has only complete blocks.
        self._is_flat = all(part.region.shape == (n * self._width,) for part, n in self._sized())
        self._views: dict[str, list[torch.Tensor]] = {}

    def _sized(self) -> Iterator[tuple[_Part, int]]:
        return zip(self._parts, self._sizes, strict=True)

    def rows(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements, [blocks, elements of a block]: a view if possible, or a copy."""
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
        """Copy rows back to their tensors, unless they are a view."""
        views = self._views_of(name)
        if not self._is_flat:
            for part, view, row in zip(self._parts, views, rows.split(self._sizes), strict=True):
                part.entry.blocks.unpack(row, view)
        elif views[0].data_ptr() != rows.data_ptr():
            flat = rows.view(-1).split([n * self._width for n in self._sizes])
            torch._foreach_copy_(views, list(flat))

    def scales(self, name: str) -> torch.Tensor:
        """Return the scales of the blocks, [blocks]."""
        found = self._scales_of(name)
        return found[0] if len(found) == 1 else torch.cat(found)

    def put_scales(self, name: str, scales: torch.Tensor) -> None:
        """Copy the scales of the blocks back to their tensors."""
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
    """Divide the blocks of entries into batches, in order.

    Args:
        entries: each with the number of elements of its local part. All have the same block size.
        at_most: elements of a batch, unless one block or one row of tiles has more.
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
