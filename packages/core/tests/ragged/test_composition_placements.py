"""Placements of several axes as values: identity, copies, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.testing import run_ranks

from .redistribution import Layout, Traffic, assert_laid_out, lay_out, numbers, same_bits

ROWS = RaggedShard((0,), (1, 3))
STRIDED = RaggedShard((0,), (1, 1), split_factor=2)

# --- identity -------------------------------------------------------------------------------------


def test_a_split_factor_is_part_of_the_placement() -> None:
    assert RaggedShard((0,), (2, 4), split_factor=2) == RaggedShard((0,), (1, 2), split_factor=2)
    assert hash(RaggedShard((0,), (2, 4), split_factor=2)) == hash(
        RaggedShard((0,), (1, 2), split_factor=2)
    )
    assert RaggedShard((0,), (1, 2), split_factor=2) != RaggedShard((0,), (1, 2))
    assert RaggedShard((0,), (1, 2), split_factor=2) != RaggedShard((0,), (1, 2), split_factor=4)
    assert RaggedShard((0,), (1, 2), split_factor=1) == RaggedShard((0,), (1, 2))
    assert RaggedShard((0,), (1, 2)).split_factor == 1
    assert RaggedShard((0,), (1, 2)).with_split_factor(3) == RaggedShard(
        (0,), (1, 2), split_factor=3
    )


def test_it_is_never_equal_to_a_placement_of_torch() -> None:
    for placement in (RaggedShard((0,), (1, 1)), STRIDED, RaggedShard.owner(0, 1)):
        for other in (Shard(0), Shard(1), Replicate(), Partial()):
            assert placement != other
            assert other != placement
            assert not isinstance(placement, type(other))
            assert placement not in (other,)
        assert not placement.is_replicate()


def test_equal_placements_are_one_key() -> None:
    keys = {
        RaggedShard((0,), (2, 4)),
        RaggedShard((0,), (1, 2)),
        Shard(0),
        RaggedShard((0, 1), (1, 2)),
    }
    assert len(keys) == 3
    assert len({STRIDED, RaggedShard((0,), (3, 3), split_factor=2), RaggedShard((0,), (1, 1))}) == 2


@pytest.mark.parametrize("placement", [ROWS, STRIDED, RaggedShard.owner(1, 2)], ids=repr)
def test_copies_of_placements(placement: RaggedShard) -> None:
    for other in (
        copy.copy(placement),
        copy.deepcopy(placement),
        pickle.loads(pickle.dumps(placement)),
        eval(repr(placement)),
    ):
        assert type(other) is RaggedShard
        assert other == placement
        assert hash(other) == hash(placement)
        assert other.split_factor == placement.split_factor


# --- copies of tensors ----------------------------------------------------------------------------


LAYOUTS: list[Layout] = [
    (Replicate(), ROWS),
    (STRIDED, Shard(0)),
    (ROWS, Shard(1)),
    (Shard(1), RaggedShard.owner(1, 2)),
]


def check_copies() -> None:
    grid, whole = init_device_mesh("cpu", (2, 2)), numbers((4, 6))
    for layout in LAYOUTS:
        x = lay_out(whole, grid, layout)
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        for other in (
            copy.deepcopy(x),
            pickle.loads(pickle.dumps(x)),
            torch.load(file, weights_only=False),
            x.clone(),
        ):
            assert_laid_out(other, whole, grid, layout)
            assert same_bits(other.full_tensor(), whole)
            other.zero_()
        assert_laid_out(x, whole, grid, layout)


def test_copies_of_tensors() -> None:
    run_ranks(check_copies, 4)


# --- what is refused ------------------------------------------------------------------------------


def assert_refused(shape: tuple[int, ...], placements: Layout, message: str) -> None:
    """By each way to make a tensor of it, before any communication."""
    grid = init_device_mesh("cpu", (2, 2))
    whole = torch.zeros(shape)
    plain = DTensor.from_local(whole, grid, [Replicate(), Replicate()], run_check=False)
    cut = RaggedShard((0,), (0, 1))
    ragged = RaggedTensor.distribute(whole, grid, [Replicate(), cut])
    with Traffic() as traffic:
        for make in (
            lambda: RaggedTensor.distribute(whole, grid, placements),
            lambda: RaggedTensor.from_local(torch.zeros(3), grid, placements, shape=shape),
            lambda: redistribute(plain, placements=placements),
            lambda: redistribute(ragged, placements=placements),
        ):
            with pytest.raises(ValueError, match=message):
                make()
    assert traffic.calls == []


def check_split_factor() -> None:
    for placements in [
        (RaggedShard((0,), (1, 1)), Shard(0)),
        (RaggedShard((0, 1), (1, 1)), Shard(0)),
        (RaggedShard((0, 1), (1, 1)), Shard(1)),
        (RaggedShard((0,), (1, 1), split_factor=4), Shard(0)),
        (RaggedShard((0,), (1, 1), split_factor=3), Shard(0)),
    ]:
        assert_refused((4, 6), placements, r"split_factor=2")
    for placements in [
        (RaggedShard((0,), (1, 1), split_factor=2), Shard(1)),  # the cuts commute
        (RaggedShard((0,), (1, 1), split_factor=2), Replicate()),
        (Replicate(), RaggedShard((0,), (1, 1), split_factor=2)),
        (Shard(0), RaggedShard((0,), (1, 1), split_factor=2)),  # already in turn
    ]:
        assert_refused((4, 6), placements, r"split_factor")


def test_a_wrong_split_factor_is_refused_with_the_right_one() -> None:
    run_ranks(check_split_factor, 4)


def check_units() -> None:
    two = {"split_factor": 2}
    for shape, placements in [
        ((4, 6), (RaggedShard((0,), (1, 3), **two), Shard(0))),  # 4 units, 2 rows left
        ((4, 6), (Shard(0), RaggedShard((0,), (1, 3)))),
        ((4, 3), (Shard(1), RaggedShard((0, 1), (5, 7)))),  # 12 units; 8 and 4 elements left
        ((5, 4), (RaggedShard((0,), (1, 2), **two), Shard(0))),  # 3 units; 3 and 2 rows left
        ((5, 4), (Shard(0), RaggedShard((0,), (1, 1)))),
        # Of a fixed size: the larger part has 12 elements; units are of all dimensions.
        ((5, 4), (Shard(0), RaggedShard((0, 1), (1, 1), elements_per_unit=4))),
        ((5, 4), (RaggedShard((0,), (1, 2), **two, elements_per_unit=4), Shard(0))),
    ]:
        assert_refused(shape, placements, "units")


def test_units_divide_what_the_shards_leave() -> None:
    run_ranks(check_units, 4)


def check_combinations() -> None:
    wrong: list[tuple[tuple[Placement, ...], str]] = [
        ((ROWS, ROWS), "RaggedShard"),
        ((RaggedShard((0,), (4,)), RaggedShard((0,), (1, 3))), "RaggedShard"),
        ((Replicate(), RaggedShard((0,), (1, 1, 2))), "for 3 ranks, but axis 1 of the mesh has 2"),
        ((RaggedShard((0,), (4,)), Replicate()), "for 1 ranks, but axis 0 of the mesh has 2"),
        ((Replicate(), RaggedShard((0,), (1, 2))), "units"),
        ((Replicate(), RaggedShard((0, 1, 2), (1, 1))), "does not fit"),
        ((Replicate(), Replicate(), ROWS), "one placement per axis"),
        ((ROWS,), "one placement per axis"),
        ((ROWS, Shard(2)), r"\S"),
        ((ROWS, Shard(-3)), r"\S"),
    ]
    for placements, message in wrong:
        assert_refused((4, 6), placements, message)


def test_combinations_that_say_nothing() -> None:
    run_ranks(check_combinations, 4)


def check_partial() -> None:
    grid, whole = init_device_mesh("cpu", (2, 2)), numbers((4, 6))
    x = lay_out(whole, grid, (Replicate(), ROWS))
    for placements in ([Partial(), ROWS], [Replicate(), Partial()], [Partial(), Shard(0)]):
        with Traffic() as traffic, pytest.raises(RuntimeError, match="cannot be redistributed"):
            redistribute(x, placements=placements)
        assert traffic.calls == []
    with pytest.raises(ValueError, match="Partial"):
        RaggedTensor.distribute(whole, grid, [Partial(), ROWS])
    # Another operation is another meaning.
    y = lay_out(whole, grid, (Partial("sum"), ROWS))
    with Traffic() as traffic, pytest.raises(RuntimeError, match="cannot be redistributed"):
        redistribute(y, placements=[Partial("max"), ROWS])
    assert traffic.calls == []


def test_nothing_becomes_partial() -> None:
    run_ranks(check_partial, 4)
