"""ShardLayout: what it says of the package's example, and its own checks."""

import dataclasses

import pytest

from vescale_fsdp.errors import PlanError
from vescale_fsdp.planner import TensorSpec, lay_out

EXAMPLE = [
    TensorSpec("a", (2, 4), block=4),
    TensorSpec("b", (3,), block=1),
    TensorSpec("c", (5, 2), block=2),
]


@pytest.fixture
def layout():
    """S = 6: a at [2, 10), b at [10, 13), c at [14, 24)."""
    return lay_out(EXAMPLE, 4)


def test_sizes_of_the_example(layout):
    assert layout.shard_size == 6
    assert layout.total_size == 24
    assert layout.offsets == (2, 10, 14)
    assert layout.order == (0, 1, 2)
    assert layout.padding == 3
    assert layout.padding_ratio == 3 / 21


def test_shard_ranges_of_the_example(layout):
    assert layout.shard_ranges(0) == [(0, 0, 4), (1, 4, 8)]
    assert layout.shard_ranges(1) == [(1, 0, 2), (2, 2, 3)]
    assert layout.shard_ranges(2) == [(2, 0, 4), (3, 4, 10)]


def test_local_range_is_empty_at_the_near_end_elsewhere(layout):
    assert [layout.local_range(1, rank) for rank in range(4)] == [(0, 0), (0, 2), (2, 3), (3, 3)]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_layout_is_refused(layout, rank):
    with pytest.raises(PlanError, match=rf"rank {rank} .* 0 to 3"):
        layout.local_range(0, rank)


def test_a_tensor_can_span_many_shards():
    layout = lay_out([TensorSpec("w", (6, 2), block=2)], 6)
    assert layout.shard_ranges(0) == [(rank, 2 * rank, 2 * rank + 2) for rank in range(6)]


def test_smaller_parts_lie_where_the_largest_do(layout):
    """Tensor parallelism may leave a rank 3 rows of c, of 5, and nothing of a."""
    parts = layout.of_parts([(0, 4), (3,), (3, 2)])
    assert (parts.offsets, parts.shard_size, parts.padding) == ((2, 10, 14), 6, 15)
    assert parts.shard_ranges(0) == []
    assert parts.shard_ranges(1) == layout.shard_ranges(1)
    assert parts.shard_ranges(2) == [(2, 0, 4), (3, 4, 6)]
    assert not parts.exact
    assert layout.of_parts([(2, 4), (3,), (5, 2)]) is layout


def test_digest_of_the_example_is_this_text(layout):
    """Stable over processes, machines and versions of Python, or ranks would disagree."""
    assert layout.digest == "489a4889ec2cda04c8e65b4401e39725a1f9fa9679a1bd648dc3a8f6facb9b1e"


CHANGES = {
    "name": ([TensorSpec("z", (2, 4), 4), *EXAMPLE[1:]], 4, 1),
    "shape": ([TensorSpec("a", (4, 2), 4), *EXAMPLE[1:]], 4, 1),
    "block": ([TensorSpec("a", (2, 4), 2), *EXAMPLE[1:]], 4, 1),
    "order of specs": ([EXAMPLE[1], EXAMPLE[0], EXAMPLE[2]], 4, 1),
    "number of shards": (EXAMPLE, 3, 1),
    "alignment": (EXAMPLE, 4, 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_digest_depends_on_every_input(layout, change):
    specs, num_shards, alignment = CHANGES[change]
    assert lay_out(specs, num_shards, alignment=alignment).digest != layout.digest


def test_digest_takes_any_name():
    assert len(lay_out([TensorSpec("gewöhn\n\ud800", (2,), 1)], 1).digest) == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_size": 7, "alignment": 2}, "S = 7 is not aligned"),
        ({"offsets": (2, 9, 14)}, "'b' overlaps"),
        ({"offsets": (3, 11, 14)}, "'a': block is split"),
        ({"offsets": (2, 10, 16)}, "tensors end at 26"),
        ({"order": (0, 1, 1)}, "permutation"),
    ],
)
def test_a_wrong_layout_does_not_come_into_being(layout, change, message):
    with pytest.raises(AssertionError, match=message):
        dataclasses.replace(layout, **change)


def test_a_later_cut_is_checked_too():
    # 8 elements in blocks of 3 from 1, S = 4: the cut at 8 is 7 from the start.
    layout = lay_out([TensorSpec("w", (8,), 1)], 3)
    with pytest.raises(AssertionError, match="later block is split"):
        dataclasses.replace(layout, specs=(TensorSpec("w", (8,), 3),), shard_size=4, offsets=(1,))
