"""GradientBuffer: one copy at the end, or additions; zero where nothing was written."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vescale_fsdp.dbuffer import GradientBuffer, Packing, SlabPool

from .helpers import CPU, OFFSETS, SHAPES, SHARD_SIZES, is_gap, make_layout, random_tensors


def make_gradients(
    dtype: torch.dtype = torch.float32, num_shards: int = 2, *, waits: bool = False
) -> GradientBuffer:
    """A buffer in memory that is full of NaN: what nobody writes would be seen."""
    pool = SlabPool(CPU)
    used = pool.take(num_shards * SHARD_SIZES[num_shards], dtype)
    used.fill_(math.nan)
    pool.give(used)
    gradients = GradientBuffer(Packing(make_layout(num_shards)), SHAPES, dtype, pool, waits=waits)
    assert gradients.flat.isnan().all()
    return gradients


def part(gradients: GradientBuffer, index: int) -> Tensor:
    """What the buffer has of tensor ``index`` when it is sent."""
    gradients.seal()
    start, shape = OFFSETS[index], SHAPES[index]
    return gradients.flat[start : start + shape.numel()].view(shape)


def test_memory_is_lent_when_the_gradients_are_complete() -> None:
    pool = SlabPool(CPU)
    gradients = GradientBuffer(Packing(make_layout(2)), SHAPES, torch.float32, pool)
    for index, tensor in enumerate(random_tensors(0)):
        gradients.add(index, tensor)
        assert not pool._lent
    gradients.seal()
    assert len(pool._lent) == 1
    gradients.release()
    assert not pool._lent


def test_gradients_that_wait_for_others_are_copied_as_they_appear() -> None:
    gradients, (first, *_) = make_gradients(waits=True), random_tensors(0)
    expected = first.clone()
    gradients.add(0, first)
    first.zero_()
    assert torch.equal(part(gradients, 0), expected)


def test_memory_is_lent_again_after_the_release() -> None:
    pool = SlabPool(CPU)
    first = GradientBuffer(Packing(make_layout(2)), SHAPES, torch.float32, pool)
    second = GradientBuffer(Packing(make_layout(2)), SHAPES, torch.float32, pool)
    addresses = first.flat.data_ptr(), second.flat.data_ptr()
    assert addresses[0] != addresses[1]
    first.release()
    third = GradientBuffer(Packing(make_layout(2)), SHAPES, torch.float32, pool)
    assert third.flat.data_ptr() == addresses[0]


def test_the_first_gradient_is_copied_and_later_ones_are_added() -> None:
    gradients, (first, *_), (second, *_) = make_gradients(), random_tensors(0), random_tensors(10)
    gradients.add(0, first)
    assert torch.equal(part(gradients, 0), first)  # not added to what was there
    gradients.add(0, second)
    assert torch.equal(part(gradients, 0), first + second)
    gradients.add(0, second)
    assert torch.equal(part(gradients, 0), first + second + second)


def test_the_given_gradient_is_not_changed() -> None:
    gradients, first = make_gradients(), torch.ones(7)
    gradients.add(1, first)
    gradients.add(1, first)
    assert first.tolist() == [1.0] * 7
    assert part(gradients, 1).tolist() == [2.0] * 7


def test_seal_zeroes_what_was_not_written_and_the_gaps() -> None:
    gradients, tensors = make_gradients(), random_tensors(0)
    gradients.add(2, tensors[2])
    flat = gradients.seal()
    assert flat is gradients.flat
    expected = torch.zeros(40)
    expected[24:36] = tensors[2].reshape(-1)
    assert torch.equal(flat, expected)


def test_seal_without_any_gradient_is_all_zeros() -> None:
    assert make_gradients().seal().tolist() == [0.0] * 40


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_gaps_are_zero_where_everything_was_written(num_shards: int) -> None:
    gradients = make_gradients(num_shards=num_shards)
    for index, tensor in enumerate(random_tensors(0)):
        gradients.add(index, tensor)
    assert torch.equal(gradients.seal() == 0, is_gap(num_shards))


def test_gradients_are_cast_to_the_dtype_of_the_buffer() -> None:
    tensor = random_tensors(0)[1]
    half = make_gradients(torch.bfloat16)
    assert half.flat.dtype == torch.bfloat16
    half.add(1, tensor)
    assert torch.equal(part(half, 1), tensor.bfloat16())
    wide = make_gradients(torch.float32)
    for _ in range(2):  # bf16 gradients are summed in fp32
        wide.add(1, tensor.bfloat16())
    assert torch.equal(part(wide, 1), 2 * tensor.bfloat16().float())


def test_sparse_gradients_are_copied_and_added() -> None:
    gradients = make_gradients()
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[2, 0, 2]]), torch.ones(3, 5), (3, 5), check_invariants=True
    )  # not coalesced: row 2 twice
    gradients.add(0, sparse)
    assert part(gradients, 0).tolist() == [[1.0] * 5, [0.0] * 5, [2.0] * 5]
    gradients.add(0, sparse)
    assert part(gradients, 0).tolist() == [[2.0] * 5, [0.0] * 5, [4.0] * 5]


def test_gradients_of_other_strides_are_laid_out_as_the_tensor() -> None:
    gradients = make_gradients()
    transposed = torch.arange(15.0).view(5, 3).t()
    gradients.add(0, transposed)
    assert gradients.seal()[:15].tolist() == transposed.reshape(-1).tolist()
    gradients.add(0, torch.ones(1).expand(3, 5))
    assert gradients.flat[:15].tolist() == (transposed + 1).reshape(-1).tolist()


def test_a_tensor_without_elements_takes_its_gradient() -> None:
    gradients = make_gradients()
    gradients.add(4, torch.zeros(0, 4))
    assert gradients.seal().tolist() == [0.0] * 40
