"""The oracle itself, on cases that can be checked by eye."""

from vescale_fsdp.planner import TensorSpec

from .naive import (
    is_legal_start,
    least_in_any_order,
    least_shard_size,
    naive_fits,
)


def test_cut_inside_must_fall_on_a_block_boundary():
    # Cuts at 6, 12, ...; 6 elements in blocks of 2 from 3 are cut after 3, from 4 after 2.
    assert not is_legal_start(3, 6, 2, 6)
    assert is_legal_start(4, 6, 2, 6)


def test_cuts_at_either_end_of_a_tensor_are_not_inside():
    assert is_legal_start(6, 6, 5, 6)


def test_every_cut_inside_counts():
    # Blocks of 3 from 1 with S = 4: the cut at 4 is 3 from the start, the cut at 8 is 7.
    assert is_legal_start(1, 7, 3, 4)
    assert not is_legal_start(1, 8, 3, 4)


def test_a_larger_shard_can_lose_a_layout():
    specs = [TensorSpec("w", (3, 2), block=2)]
    assert [naive_fits(specs, 3, shard_size, 1) for shard_size in (2, 3, 4)] == [True, False, True]


def test_least_shard_size_of_the_example_is_6():
    specs = [TensorSpec("a", (2, 4), 4), TensorSpec("b", (3,), 1), TensorSpec("c", (5, 2), 2)]
    assert least_shard_size(specs, 4) == 6


def test_the_least_of_all_orders():
    # Whole tensors: |2 3|2 3| takes 5, |2 2|3 3| takes 6.
    specs = [TensorSpec(str(i), (size,), size) for i, size in enumerate((2, 2, 3, 3))]
    assert least_shard_size(specs, 2) == 6
    assert least_in_any_order(specs, 2) == 5
