"""8-bit codes: blocks of numbers as one scale and one byte each.

A number x of a block is kept as the code of that entry of a map which is nearest to x / scale,
where scale is the largest magnitude in the block. The map is *dynamic*: seven decades below 1,
each divided evenly, the upper ones more finely::

    decade       [0.1, 1]    [0.01, 0.1]    [0.001, 0.01]    ...    [1e-7, 1e-6]
    entries        64           32              16                      1          signed: and as
    unsigned      128           64              32                      2          many below zero

An entry is the middle of its part of the decade; 0 and 1 come besides, so that there are 256.

Source: arXiv 1511.04561 (dynamic tree), arXiv 2110.02861 (8-bit optimizers, blocks). The maps are
those of bitsandbytes and torchao, but for the last bit of some entries; the code here is the
nearest one exactly, with ties to the larger entry.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import torch

SMALLEST_SCALE = 1e-12
_NUM_DECADES = 7
_PREFIXES = 1 << 16  # of the bits of a float32


@lru_cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """The 256 entries, ascending: float32 numbers in [-1, 1], or in [0, 1] without a sign."""
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
    """A map with what it takes to find the nearest entry of many numbers.

    Finding: the upper 16 bits of a float32 say which numbers it can be, and no two midpoints
    between entries lie among them. So a table of 65,536 gives a code, and one comparison with a
    midpoint says whether it is the next one. (A binary search takes ten times as long on a CPU.)

    Args:
        signed: for numbers of both signs, or for those that are not negative.
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
        """Codes and scales of ``numbers``, float32 [blocks, elements of a block].

        Returns:
            uint8 of the same shape, and float32 [blocks]. Blocks of zeros, and those below 1e-12,
            have the scale 1e-12. In a block with NaN or infinity all is NaN after `decode`.
        """
        scales = numbers.abs().amax(1).clamp_(min=SMALLEST_SCALE)
        scaled = numbers / scales[:, None]
        flat = scaled.view(-1)
        prefix = (flat.view(torch.int32) >> 16).bitwise_and_(_PREFIXES - 1)
        codes = self._code.index_select(0, prefix)
        codes += flat >= self._cut.index_select(0, prefix)
        return codes.view(numbers.shape), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The numbers that `encode` has made ``codes`` [blocks, elements] and ``scales`` of."""
        entries = self._entries.index_select(0, codes.reshape(-1).int())
        return entries.view(codes.shape).mul_(scales[:, None])


@lru_cache
def codebook(signed: bool, device: torch.device) -> Codebook:
    """The codebook on a device, made at first use."""
    return Codebook(signed, device)


def _midpoint(below: float, above: float) -> float:
    """The smallest float32 that is not below the middle of two."""
    middle = (Fraction(below) + Fraction(above)) / 2
    rounded = torch.tensor(float(middle), dtype=torch.float64).float()
    if Fraction(rounded.item()) < middle:
        rounded = torch.nextafter(rounded, torch.tensor(math.inf))
    return rounded.item()


def _ranges_of_prefixes() -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest float32 with each prefix; 0 for NaN and infinity."""
    bits = torch.arange(_PREFIXES, dtype=torch.int64) << 16
    bits = torch.where(bits < 2**31, bits, bits - 2**32)
    ends = torch.stack([bits, bits + _PREFIXES - 1]).int().view(torch.float32)
    ends[:, ~ends.isfinite().all(0)] = 0.0
    return ends.amin(0), ends.amax(0)
