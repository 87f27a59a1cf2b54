"""Numbers of 8 bits for the wire: a block of them is one scale, and one byte for each.

::

    scale = (largest magnitude in the block) / top      float32; top: 127 for int8, 448 for e4m3
    code  = x / scale, rounded to the nearest           ties to even
    x'    = code * scale                                float32, then rounded to the dtype wanted

* A block whose largest magnitude is below 1e-12, zeros included, has the scale of 1e-12.
* A block that holds infinity or NaN has the scale NaN, and all of its numbers become NaN.

Arithmetic is in float32; other dtypes are cast first. All operations are of one rounding each, so
the bits are the same wherever IEEE 754 holds. Codes lie in the order of the elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from vescale_fsdp.ragged import Blocks, BlockSize, Region

CodeDtype = Literal["int8", "e4m3"]

TOP = {"int8": 127.0, "e4m3": 448.0}
_SMALLEST = 1e-12
_TORCH = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
# Elements that are coded at once: on a CPU what lies in its cache, elsewhere what keeps a device
# busy.
_AT_ONCE_CPU, _AT_ONCE = 2**18, 2**26


@dataclass(frozen=True)
class Coding:
    """How one tensor is sent: the dtype of its codes, and its blocks."""

    dtype: CodeDtype
    blocks: Blocks
    decodes: bool = True  # before it is computed with

    def __str__(self) -> str:
        kept = "" if self.decodes else ", not decoded"
        return f"{self.dtype} in blocks of {self.blocks.size}{kept}"

    @property
    def size(self) -> BlockSize:
        """Of a block, as this tensor has them."""
        return self.blocks.tile or self.blocks.numel


def checked_block(
    fqn: str,
    shape: Sequence[int],
    block: int | None,
    gather: Coding | None,
    reduce: Coding | None,
) -> int:
    """Return the planner's block of a parameter, in elements. It splits none of its blocks.

    Args:
        shape: of the data to shard.
        block: of the user's granularity. None: there is none.

    Raises:
        ValueError: the user's granularity allows splits within a block.
    """
    numel = math.prod(shape)
    for option, coding in (("QuantizedGather", gather), ("QuantizedReduce", reduce)):
        unit = 1 if coding is None else coding.blocks.unit
        if block is not None and block < numel and block % unit:
            assert coding is not None, "1 divides everything"
            raise ValueError(
                f"fully_shard: the granularity of {fqn!r}, of shape {tuple(shape)}, allows splits "
                f"between any two blocks of {block} elements, but it is sent as {coding}, whose "
                f"blocks end at multiples of {unit} elements. Join the two: granularity=combine("
                f"yours, {option}.granularity()); or leave out granularity=, which then follows "
                "from the codec"
            )
    if block is not None:
        return block
    units = [coding.blocks.unit for coding in (gather, reduce) if coding is not None]
    return min(math.lcm(*units), max(numel, 1))


def encode(
    numbers: torch.Tensor,
    dtype: CodeDtype,
    size: BlockSize,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Write the codes and scales of ``numbers``.

    Args:
        numbers: [elements], in blocks of ``size``; or [rows, columns], in tiles of ``size``.
        dtype: of the codes.
        size: of a block; those at the end may be smaller.
        codes: of as many elements, flat, uint8.
        scales: [blocks], float32, row of tiles by row of tiles.
    """
    values = numbers if numbers.dtype == torch.float32 else numbers.float()
    # By a tensor: CUDA multiplies by the reciprocal of a number of Python, which is rounded twice.
    top = scales.new_full((), TOP[dtype])
    scales.copy_(_largest(values, size)).clamp_(min=_SMALLEST).div_(top)
    scales.masked_fill_(scales.isfinite().logical_not_(), torch.nan)
    scaled = torch.empty_like(values)
    spread = _spread(scales, values.shape, size)
    for part, into, scale in zip(_parts(values, size), _parts(scaled, size), spread, strict=True):
        torch.div(part, scale, out=into)
    if dtype == "int8":
        scaled.round_()
    codes.view(_TORCH[dtype]).copy_(scaled.view(-1))


def decode(
    codes: torch.Tensor,
    dtype: CodeDtype,
    size: BlockSize,
    scales: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """Write to ``numbers`` what `encode` has made ``codes`` and ``scales`` of."""
    is_wide = numbers.dtype == torch.float32
    values = numbers if is_wide else torch.empty_like(numbers, dtype=torch.float32)
    if dtype == "e4m3" and codes.device.type == "cpu":
        values.copy_(_as_float16(codes).view(values.shape))
        scales = scales * 256.0
    else:
        values.copy_(codes.view(_TORCH[dtype]).view(values.shape))
    spread = _spread(scales, values.shape, size)
    for part, scale in zip(_parts(values, size), spread, strict=True):
        part.mul_(scale)
    if not is_wide:
        numbers.copy_(values)


def encode_blocks(
    coding: Coding, numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Write the codes and scales of consecutive whole blocks of a tensor.

    Args:
        numbers: flat; of any dtype.
        codes: uint8, flat, and as long.
        scales: float32, flat: one for each block.
    """
    for region, place, own in _regions(coding, codes, scales):
        encode(region.of(numbers), coding.dtype, coding.size, place, own)


def decode_blocks(
    coding: Coding, codes: torch.Tensor, scales: torch.Tensor, numbers: torch.Tensor
) -> None:
    """Write to ``numbers`` what the codes and scales of consecutive whole blocks stand for.

    Args:
        codes: uint8, flat, and as long as ``numbers``, which may be of any dtype.
        scales: float32, flat.
    """
    for region, place, own in _regions(coding, codes, scales):
        decode(place, coding.dtype, coding.size, own, region.of(numbers))


def _regions(
    coding: Coding, codes: torch.Tensor, scales: torch.Tensor
) -> Iterator[tuple[Region, torch.Tensor, torch.Tensor]]:
    """What is coded at once, with its codes and scales."""
    at_most = _AT_ONCE_CPU if codes.device.type == "cpu" else _AT_ONCE
    blocks, first = coding.blocks, 0
    for region in blocks.regions(blocks.shape, len(codes), at_most):
        place = codes.narrow(0, region.start, math.prod(region.shape))
        yield region, place, scales.narrow(0, first, region.num_blocks)
        first += region.num_blocks


def is_offered(dtype: CodeDtype, device: torch.device) -> bool:
    """Whether numbers can be cast to codes and back on ``device``."""
    try:
        ones = torch.ones(16, device=device).to(_TORCH[dtype]).float()
    except (RuntimeError, TypeError, NotImplementedError):  # which one depends on the device
        return False
    return bool((ones == 1).all())


def _as_float16(codes: torch.Tensor) -> torch.Tensor:
    """Codes of e4m3 as numbers that are 256 times smaller: their bits at the place of float16's.

    Torch's own cast takes seven times as long on a CPU.
    """
    wide = codes.view(torch.int8).to(torch.int16)  # the sign is in all of the upper bits
    return wide.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)


def _parts(numbers: torch.Tensor, size: BlockSize) -> Iterator[torch.Tensor]:
    """Views of the whole blocks and of the rest, if there is one.

    [blocks, elements] of flat ones, [rows of tiles, rows of a tile, columns] of tiles.
    """
    step = size if isinstance(size, int) else size[0]
    whole = len(numbers) // step * step
    if whole:
        yield numbers[:whole].unflatten(0, (-1, step))
    if whole < len(numbers):
        yield numbers[whole:].unsqueeze(0)


def _largest(numbers: torch.Tensor, size: BlockSize) -> torch.Tensor:
    """The largest magnitude of each block; NaN where there is one."""
    found = [torch.maximum(part.amax(1), part.amin(1).neg_()) for part in _parts(numbers, size)]
    largest = found[0] if len(found) == 1 else torch.cat(found)
    if isinstance(size, int):
        return largest
    columns = size[1]
    padded = F.pad(largest, (0, -largest.shape[1] % columns))
    return padded.view(len(padded), -1, columns).amax(2).view(-1)


def _spread(scales: torch.Tensor, shape: torch.Size, size: BlockSize) -> Iterator[torch.Tensor]:
    """The scales of the blocks in each of `_parts`, in a shape that multiplies them."""
    if isinstance(size, int):
        rows = scales.view(-1, 1)
        num_whole = shape[0] // size
    else:
        columns = shape[1]
        by_tile = scales.view(-1, -(-columns // size[1]), 1)
        rows = by_tile.expand(-1, -1, size[1]).flatten(1)[:, None, :columns]
        num_whole = shape[0] // size[0]
    if num_whole:
        yield rows[:num_whole]
    if num_whole < len(rows):
        yield rows[num_whole:]
