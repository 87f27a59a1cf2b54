"""Rounding to 8 bits, block by block and one block after the other: what all else must equal."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vescale_fsdp.ragged.blocks import BlockSize

TOP = {"int8": 127.0, "e4m3": 448.0}


def blocks_of(whole: Tensor, size: BlockSize) -> Iterator[Tensor]:
    """Views of the blocks of a contiguous tensor."""
    if isinstance(size, tuple) and whole.dim() in (2, 3):
        for matrix in whole if whole.dim() == 3 else [whole]:
            for rows in matrix.split(size[0]):
                yield from rows.split(size[1], dim=1)
    else:
        yield from whole.view(-1).split(math.prod(size) if isinstance(size, tuple) else size)


def rounded(whole: Tensor, dtype: str, size: BlockSize) -> Tensor:
    """What comes out of 8 bits, in float32."""
    result = whole.detach().float().clone()
    for block in blocks_of(result, size):
        if not block.isfinite().all():
            block.fill_(math.nan)
            continue
        scale = block.abs().max().clamp(min=1e-12) / TOP[dtype]
        scaled = block / scale
        if dtype == "int8":
            codes = scaled.round().to(torch.int8)
        else:
            codes = scaled.to(torch.float8_e4m3fn)
        block.copy_(codes.float() * scale)
    return result


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal, with NaN in the same places."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
