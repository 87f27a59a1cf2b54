"""The lower bound for all orders: never above what an order needs, and met where it should be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_fsdp.planner import TensorSpec
from vescale_fsdp.planner.solve import Item, lower_bound

from .naive import least_in_any_order, least_shard_size

pairs = st.tuples(st.integers(0, 14), st.integers(1, 9))


def specs_of(items):
    return [TensorSpec(str(i), (size,), block) for i, (size, block) in enumerate(items)]


@settings(deadline=None, max_examples=200)
@given(st.lists(pairs, max_size=4), st.integers(1, 6))
def test_no_order_needs_less(items, num_shards):
    bound = lower_bound([Item(*pair) for pair in items], num_shards)
    least = least_in_any_order(specs_of(items), num_shards)
    assert bound.shard_size <= least


def test_one_tensor_meets_its_bound_always():
    for size in range(1, 20):
        for block in range(1, 9):
            for num_shards in range(1, 6):
                bound = lower_bound([Item(size, block)], num_shards)
                assert bound.shard_size == least_shard_size(
                    specs_of([(size, block)]), num_shards
                ), (size, block, num_shards)


@pytest.mark.parametrize(
    ("items", "num_shards", "expected"),
    [
        ([], 4, (0, 1)),
        ([(0, 5)], 4, (0, 1)),
        # The average: 10 / 4, rounded up.
        ([(7, 1), (3, 1)], 4, (3, 1)),
        # A whole tensor.
        ([(7, 7), (3, 1)], 4, (7, 1)),
        # One cut: 5 before it, 8 after it. 5 would divide S = 5 or 10: no fit, and more.
        ([(13, 5)], 2, (8, 1)),
        # Three shards hold 13 with S = 5, which 5 divides.
        ([(13, 5)], 3, (5, 1)),
        # Rows of 6 and 10, both tensors of many shards: a multiple of 30, not the average of 20.
        ([(600, 6), (600, 10)], 60, (30, 30)),
    ],
)
def test_bounds_that_can_be_checked_by_eye(items, num_shards, expected):
    assert lower_bound([Item(*pair) for pair in items], num_shards) == expected


def test_it_knows_nothing_of_tensors_that_share_a_shard():
    # Three whole tensors of 2 over 2 shards: the average is 3, but a shard of 3 holds one.
    items = [(2, 2)] * 3
    assert lower_bound([Item(*pair) for pair in items], 2).shard_size == 3
    assert least_in_any_order(specs_of(items), 2) == 4
