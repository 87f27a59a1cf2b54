"""Codes of 8 bits: the bits of the slow way, and what happens at the ends of the range."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vescale_fsdp.dbuffer.eight_bits import CodeDtype, decode, encode, is_offered
from vescale_fsdp.ragged.blocks import BlockSize

from .rounding import assert_same_bits, rounded

DTYPES = ["int8", "e4m3"]


def through(numbers: Tensor, dtype: CodeDtype, size: BlockSize, into: torch.dtype) -> Tensor:
    extents = size if isinstance(size, tuple) else (size,)
    num_blocks = math.prod(-(-n // b) for n, b in zip(numbers.shape, extents, strict=True))
    codes = torch.empty(numbers.numel(), dtype=torch.uint8)
    scales = torch.empty(num_blocks)
    encode(numbers, dtype, size, codes, scales)
    found = torch.empty(numbers.shape, dtype=into)
    decode(codes, dtype, size, scales, found)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((12,), 4),
        ((11,), 4),  # the last block has 3
        ((3,), 4),
        ((8, 6), (4, 3)),
        ((9, 7), (4, 3)),  # 1 row and 1 column over
        ((2, 2), (4, 3)),
    ],
)
def test_every_block_is_rounded_by_its_own_scale(
    dtype: CodeDtype, shape: tuple[int, ...], size: BlockSize
) -> None:
    numbers = torch.randn(shape) * torch.logspace(-6, 6, math.prod(shape)).view(shape)
    found = through(numbers, dtype, size, torch.float32)
    assert_same_bits(found, rounded(numbers, dtype, size))
    assert not torch.equal(found, numbers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_codes_come_back_as_torch_reads_them(dtype: CodeDtype) -> None:
    """The way around torch's slow cast of e4m3 on CPUs, for every code that is written."""
    codes = torch.arange(256, dtype=torch.uint8)
    if dtype == "e4m3":
        codes = codes[codes & 127 != 127]  # NaN: its block has the scale NaN
    kind = torch.int8 if dtype == "int8" else torch.float8_e4m3fn
    found = torch.empty(len(codes))
    decode(codes, dtype, 1000, torch.tensor([0.1]), found)
    assert_same_bits(found, codes.view(kind).float() * torch.tensor(0.1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros_and_tiny_blocks_have_the_scale_of_the_smallest(dtype: CodeDtype) -> None:
    numbers = torch.tensor([0.0, 0.0, 1e-30, -1e-30, 4e-13, -4e-13])
    found = through(numbers, dtype, 2, torch.float32)
    assert_same_bits(found, rounded(numbers, dtype, 2))
    assert found[:4].abs().max() == 0
    assert found[4] == pytest.approx(4e-13, rel=0.04)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(
    dtype: CodeDtype, bad: float
) -> None:
    numbers = torch.randn(8, 8)
    numbers[1, 1] = bad
    found = through(numbers, dtype, (4, 4), torch.float32)
    assert found[:4, :4].isnan().all()
    assert_same_bits(found, rounded(numbers, dtype, (4, 4)))
    assert int(found.isnan().sum()) == 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_number_of_a_block_loses_one_rounding_at_most(dtype: CodeDtype) -> None:
    numbers = torch.randn(200, 16)
    found = through(numbers.view(-1), dtype, 16, torch.float32).view(200, 16)
    largest = numbers.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(
        found.gather(1, largest), numbers.gather(1, largest), rtol=2e-7, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_dtypes_are_cast_before_and_rounded_once_after(dtype: CodeDtype) -> None:
    numbers = torch.randn(9, 7).bfloat16()
    found = through(numbers, dtype, (4, 3), torch.bfloat16)
    assert_same_bits(found, rounded(numbers, dtype, (4, 3)).bfloat16())


def test_a_cpu_has_both_kinds_of_codes() -> None:
    assert is_offered("int8", torch.device("cpu"))
    assert is_offered("e4m3", torch.device("cpu"))
