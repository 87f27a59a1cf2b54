"""RaggedShard: units, ranges, identity and the way from an interval to a placement."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import product

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_fsdp import RaggedShard

# --- units ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ((1, 2), (1, 2)),
        ((2, 4), (1, 2)),
        ((6, 0, 9, 3), (2, 0, 3, 1)),
        ((0, 0, 5), (0, 0, 1)),
        ((7,), (1,)),
        ((0, 0), (0, 0)),
    ],
)
def test_units_are_in_lowest_terms(given: tuple[int, ...], canonical: tuple[int, ...]) -> None:
    placement = RaggedShard((0,), given)
    assert placement.local_units == canonical
    assert placement.total_units == sum(canonical)
    assert placement.num_shards == len(given)


def test_placements_with_a_common_factor_are_equal() -> None:
    assert RaggedShard((0,), (2, 4)) == RaggedShard((0,), (3, 6))
    assert hash(RaggedShard((0,), (2, 4))) == hash(RaggedShard((0,), (3, 6)))
    assert RaggedShard((0,), (1, 2)) != RaggedShard((0,), (2, 1))
    assert RaggedShard((0,), (1, 2)) != RaggedShard((0,), (1, 2, 0))
    assert RaggedShard((0,), (1, 2)) != RaggedShard((0, 1), (1, 2))


def test_ranks_without_units_hold_nothing() -> None:
    placement = RaggedShard((0,), (1, 0, 3, 2))
    ranges = [placement.local_range((6, 4), rank) for rank in range(4)]
    assert ranges == [(0, 4), (4, 4), (4, 16), (16, 24)]  # a unit is a row of 4 elements
    assert placement.unit_numel((6, 4)) == 4


def test_a_unit_may_be_part_of_a_row() -> None:
    placement = RaggedShard((0, 1), (1, 5))
    assert [placement.local_range((2, 6), rank) for rank in range(2)] == [(0, 2), (2, 12)]


def test_a_thousand_equal_ranks_take_one_run() -> None:
    placement = RaggedShard.from_interval(0, 4, 1000, (1000, 4))
    assert placement == RaggedShard((0,), [1] * 1000)
    assert placement._runs == ((1000, 1),)
    assert placement.local_range((1000, 4), 999) == (3996, 4000)


@pytest.mark.parametrize(
    ("dims", "units", "message"),
    [
        ((1,), (1, 1), r"prefix \(0, 1, ...\) of the dimensions, got \(1,\)"),
        ((0, 2), (1, 1), r"got \(0, 2\)"),
        ((0,), (), "at least one rank, got none"),
        ((0,), (2, -1), "not be negative, got -1"),
    ],
)
def test_nonsense_is_refused(dims: tuple[int, ...], units: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RaggedShard(dims, units)
    with pytest.raises(ValueError, match="elements_per_unit must be at least 1, got 0"):
        RaggedShard((0,), (1, 1), elements_per_unit=0)


# --- units of a fixed size ------------------------------------------------------------------------


def test_units_of_a_fixed_size_end_where_a_part_ends() -> None:
    """5 rows of 2 elements on one tensor rank, 4, 2 and none on others."""
    placement = RaggedShard((0,), (3, 0, 2)).fixed_in((5, 2))
    assert placement == RaggedShard((0, 1), (6, 0, 4), elements_per_unit=1)
    assert placement != RaggedShard((0, 1), (3, 0, 2))
    parts = {
        (5, 2): [(0, 6), (6, 6), (6, 10)],
        (4, 2): [(0, 6), (6, 6), (6, 8)],
        (2, 2): [(0, 4), (4, 4), (4, 4)],
        (0, 2): [(0, 0)] * 3,
    }
    for shape, ranges in parts.items():
        assert [placement.local_range(shape, rank) for rank in range(3)] == ranges
        held = [elements for count, elements in placement.runs_in(shape) for _ in range(count)]
        assert held == [stop - start for start, stop in ranges]
    with pytest.raises(ValueError, match="its 5 units have 10 elements, and the tensor has 12"):
        placement.local_range((6, 2), 0)


def test_what_is_whole_on_a_rank_has_no_units_to_fix() -> None:
    owner = RaggedShard.owner(1, 3)
    assert owner.fixed_in((5, 2)) is owner


# --- owner, scalars, nothing ----------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_owner_holds_all_of_any_shape(rank: int) -> None:
    placement = RaggedShard.owner(rank, 3)
    assert placement == RaggedShard((), [int(k == rank) for k in range(3)])
    for shape in [(), (1,), (5,), (2, 3), (2, 1, 3)]:
        numel = math.prod(shape)
        lengths = [
            stop - start for start, stop in (placement.local_range(shape, k) for k in range(3))
        ]
        assert lengths == [numel if k == rank else 0 for k in range(3)]


@pytest.mark.parametrize("rank", [-1, 3])
def test_owner_outside_the_axis_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"in \[0, 3\), got {rank}"):
        RaggedShard.owner(rank, 3)


def test_a_scalar_has_one_owner() -> None:
    placement = RaggedShard.from_interval(5, 4, 3, ())
    assert placement == RaggedShard.owner(1, 3)
    assert [placement.local_range((), rank) for rank in range(3)] == [(0, 0), (0, 1), (1, 1)]


def test_a_scalar_has_no_two_holders() -> None:
    with pytest.raises(ValueError, match="its 2 units must divide"):
        RaggedShard((), (1, 1)).local_range((), 0)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 3)])
def test_a_tensor_without_elements_is_held_by_nobody(shape: tuple[int, ...]) -> None:
    placement = RaggedShard.from_interval(7, 4, 3, shape)
    assert placement.num_shards == 3
    assert placement.total_units == 0
    assert [placement.local_range(shape, rank) for rank in range(3)] == [(0, 0)] * 3
    # Units of any number fit: there is nothing to divide.
    assert RaggedShard((0,), (1, 2)).local_range(shape, 1) == (0, 0)


# --- identity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [Shard(0), Shard(1), Replicate(), Partial()])
def test_never_equal_to_another_placement(other: object) -> None:
    for ragged in [RaggedShard((0,), (1, 1)), RaggedShard((), (1, 0)), RaggedShard((0, 1), (1, 2))]:
        assert (ragged == other) is False
        assert (other == ragged) is False
        assert ragged != other
        assert other != ragged
        assert hash(ragged) != hash(other)
        assert len({ragged, other}) == 2


def test_is_none_of_the_placements_that_torch_knows() -> None:
    placement = RaggedShard((0,), (1, 1))  # the data lies as with Shard(0)
    assert not isinstance(placement, Shard | Replicate | Partial)
    assert [placement.is_shard(dim) for dim in (None, 0, 1)] == [True, True, False]
    with pytest.raises(AttributeError, match="no 'dim': a rank holds a flat range"):
        _ = placement.dim
    assert not placement.is_replicate()
    assert not placement.is_partial()
    assert not placement.is_partial("sum")


@pytest.mark.parametrize(
    "placement",
    [
        RaggedShard((0,), (1, 0, 3, 2)),
        RaggedShard((), (0, 1)),
        RaggedShard((0, 1), (5, 7)),
        RaggedShard((), (0, 0)),
        RaggedShard((0, 1), (3, 2), split_factor=2, elements_per_unit=4),
        RaggedShard.from_interval(3, 100, 10_001, (1000, 1000)),
    ],
    ids=repr,
)
def test_copies_are_equal(placement: RaggedShard) -> None:
    for other in [
        copy.copy(placement),
        copy.deepcopy(placement),
        pickle.loads(pickle.dumps(placement)),
    ]:
        assert type(other) is RaggedShard
        assert other == placement
        assert hash(other) == hash(placement)
        assert other.dims == placement.dims
        assert other.local_units == placement.local_units


def test_repr_is_the_call_that_makes_it() -> None:
    placement = RaggedShard((0,), (1, 0, 3, 2))
    assert repr(placement) == "RaggedShard(dims=(0,), local_units=(1, 0, 3, 2))"
    assert eval(repr(placement)) == placement
    fixed = RaggedShard((0,), (1, 2), elements_per_unit=4)
    assert repr(fixed) == "RaggedShard(dims=(0,), local_units=(1, 2), elements_per_unit=4)"
    assert eval(repr(fixed)) == fixed


def test_repr_is_short_for_many_ranks() -> None:
    assert len(repr(RaggedShard.from_interval(5, 8, 10_000, (60_000,)))) < 120
    assert len(repr(RaggedShard((0,), range(1, 1000)))) < 120


# --- from_interval --------------------------------------------------------------------------------

SHAPES = [
    *[(n,) for n in range(1, 13)],
    *[shape for ndim in (2, 3) for shape in product((1, 2, 3, 4), repeat=ndim)],
    (2, 3, 1, 2),
    (2, 2, 2, 2),
    (),
]


def test_from_interval_is_the_intersection_with_each_shard() -> None:
    num_cases = 0
    for num_shards, shard_size, shape in product((1, 2, 3, 4), range(1, 14), SHAPES):
        numel = math.prod(shape)
        for start in range(num_shards * shard_size - numel + 1):
            placement = RaggedShard.from_interval(start, shard_size, num_shards, shape)
            assert placement.num_shards == num_shards
            for rank in range(num_shards):
                held = [
                    element
                    for element in range(numel)
                    if rank * shard_size <= start + element < (rank + 1) * shard_size
                ]
                first, last = placement.local_range(shape, rank)
                assert list(range(first, last)) == held, (start, shard_size, num_shards, shape)
            num_cases += 1
    assert num_cases > 15_000  # the loops above are not empty


def test_from_interval_takes_as_few_dimensions_as_express_the_cuts() -> None:
    for num_shards, shard_size, shape in product((2, 3), range(1, 14), SHAPES):
        for start in range(num_shards * shard_size - math.prod(shape) + 1):
            placement = RaggedShard.from_interval(start, shard_size, num_shards, shape)
            num_dims = len(placement.dims)
            if num_dims:
                fewer = math.prod(shape[: num_dims - 1])
                assert fewer % placement.total_units, (start, shard_size, num_shards, shape)


@pytest.mark.parametrize(
    ("start", "shard_size", "num_shards", "shape", "expected"),
    [
        # Cut at 4 of 24 elements: rows of 4.
        (8, 12, 3, (6, 4), RaggedShard((0,), (1, 3, 2))),
        # Cut at 2: half a row, so both dimensions are needed; units of 2 elements.
        (10, 12, 3, (6, 4), RaggedShard((0, 1), (1, 6, 5))),
        # Rows of 12 = 3 x 4, the cut at 12.
        (0, 12, 2, (2, 3, 4), RaggedShard((0,), (1, 1))),
        # The cut at 4 of shape (2, 3, 4): columns of the second dimension.
        (8, 12, 3, (2, 3, 4), RaggedShard((0, 1), (1, 3, 2))),
        # One shard holds all.
        (13, 12, 3, (2, 3), RaggedShard((), (0, 1, 0))),
        # It ends exactly at a cut, and starts exactly at one.
        (6, 6, 3, (2, 3), RaggedShard((), (0, 1, 0))),
    ],
)
def test_from_interval_by_example(
    start: int, shard_size: int, num_shards: int, shape: tuple[int, ...], expected: RaggedShard
) -> None:
    assert RaggedShard.from_interval(start, shard_size, num_shards, shape) == expected


# --- errors of local_range ------------------------------------------------------------------------


def test_units_must_divide_the_dimensions() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 3\): its 3 units .* which is 4"):
        RaggedShard((0,), (1, 2)).local_range((4, 3), 0)
    assert RaggedShard((0, 1), (1, 2)).local_range((4, 3), 1) == (4, 12)


def test_tensor_must_have_the_dimensions() -> None:
    with pytest.raises(ValueError, match=r"does not fit a tensor of shape \(6,\)"):
        RaggedShard((0, 1), (1, 2)).local_range((6,), 0)


def test_no_units_hold_no_elements() -> None:
    with pytest.raises(ValueError, match="its 0 units must divide"):
        RaggedShard((), (0, 0)).local_range((2,), 0)


@pytest.mark.parametrize(("rank", "message"), [(-1, "negative, got -1"), (2, "has 2 ranks")])
def test_rank_must_be_on_the_axis(rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RaggedShard((0,), (1, 2)).local_range((3,), rank)
