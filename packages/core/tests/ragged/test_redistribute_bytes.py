"""Redistribution moves what a rank needs and lacks, and nothing else.

The expected numbers are counted element by element from the two layouts; the found ones are
those of the collectives that the rank calls.
"""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh
from .redistribution import (
    Layout,
    Traffic,
    assert_laid_out,
    lay_out,
    num_elements_moved,
    numbers,
    unit_vectors,
)

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3, 4])


def assert_least(shape: tuple[int, ...], source: Layout, target: Layout) -> Traffic:
    """One redistribution on one axis; each rank sends and receives the derived number of bytes."""
    mesh, at = make_mesh(), (dist.get_rank(),)
    x = lay_out(numbers(shape), mesh, source)
    with Traffic() as traffic:
        redistribute(x, placements=target).to_local().sum()
    sent, received = num_elements_moved(shape, source, target, tuple(mesh.shape))
    assert traffic.num_bytes_sent == 4 * sent[at], (source, target, traffic)
    assert traffic.num_bytes_received == 4 * received[at], (source, target, traffic)
    return traffic


# --- the derived numbers --------------------------------------------------------------------------


def test_the_derived_number_by_example() -> None:
    """Rows 0 | 1 2 3 | become 0 1 | 2 | 3: row 1 goes to rank 0, row 3 to rank 2."""
    source, target = (RaggedShard((0,), (1, 3, 0)),), (RaggedShard((0,), (2, 1, 1)),)
    sent, received = num_elements_moved((4, 5), source, target, (3,))
    assert sent == {(0,): 0, (1,): 10, (2,): 0}
    assert received == {(0,): 5, (1,): 0, (2,): 5}


def check_example() -> tuple[int, int]:
    source, target = (RaggedShard((0,), (1, 3, 0)),), (RaggedShard((0,), (2, 1, 1)),)
    traffic = assert_least((4, 5), source, target)
    return traffic.num_bytes_sent, traffic.num_bytes_received


def test_the_found_number_by_example() -> None:
    assert run_ranks(check_example, 3) == [(0, 20), (40, 0), (0, 20)]


# --- one axis -------------------------------------------------------------------------------------


def check_ragged_to_ragged() -> None:
    for shape in [(4, 2), (5, 1), (2, 2, 2)]:
        cuts = unit_vectors(shape, dist.get_world_size())
        cuts = cuts[:: 1 + len(cuts) // 10]
        for source, target in zip(cuts, cuts[3:] + cuts[:3], strict=True):
            traffic = assert_least(shape, (source,), (target,))
            assert len(traffic.calls) <= 1


@WORLD_SIZES
def test_ragged_to_ragged_is_one_packed_exchange(world_size: int) -> None:
    run_ranks(check_ragged_to_ragged, world_size)


def check_shards() -> None:
    size = dist.get_world_size()
    for shape in [(2 * size, 3), (5, 3), (1, 7), (3, 2, 5)]:
        cuts = unit_vectors(shape[:2], size)
        for cut in cuts[:: 1 + len(cuts) // 6]:
            for dim in range(len(shape)):
                assert len(assert_least(shape, (cut,), (Shard(dim),)).calls) <= 1
                assert len(assert_least(shape, (Shard(dim),), (cut,)).calls) <= 1


@WORLD_SIZES
def test_shards_are_reached_directly(world_size: int) -> None:
    run_ranks(check_shards, world_size)


def check_even_gather() -> None:
    size = dist.get_world_size()
    for cut in (RaggedShard((0,), [1] * size), RaggedShard((0, 1), [2] * size)):
        traffic = assert_least((2 * size, 3), (cut,), (Replicate(),))
        assert len(traffic.calls) == 1
        assert "gather" in traffic.calls[0]
        assert traffic.num_bytes_gathered == 2 * size * 3 * 4


@WORLD_SIZES
def test_equal_parts_are_one_gather_of_the_tensor(world_size: int) -> None:
    run_ranks(check_even_gather, world_size)


def check_uneven_gather() -> None:
    for shape in [(4, 2), (5, 1), (2, 2, 2), (), (0, 3)]:
        for cut in unit_vectors(shape, dist.get_world_size())[::11]:
            assert_least(shape, (cut,), (Replicate(),))


@WORLD_SIZES
def test_unequal_parts_are_gathered_without_padding(world_size: int) -> None:
    run_ranks(check_uneven_gather, world_size)


def check_many_holders() -> None:
    """Where broadcasts would be too many: here, more than one of them."""
    mesh = make_mesh()
    nearly_even, uneven = RaggedShard((0,), (2, 2, 1)), RaggedShard((0,), (3, 1, 1))
    module = sys.modules["vescale_fsdp.ragged.moves"]
    with mock.patch.object(module, "_MOST_BROADCASTS", 1):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
            whole = numbers((5, 3), dtype)
            x = lay_out(whole, mesh, (nearly_even,))
            with Traffic() as traffic:
                y = redistribute(x, placements=[Replicate()])
            assert_laid_out(y, whole, mesh, (Replicate(),))
            assert len(traffic.calls) == 1
            # Parts of six elements at most, so that each rank gets 2 * 6 of 15, padding included.
            assert traffic.num_bytes_received == 12 * dtype.itemsize
        # 3 * 9 elements would be 1.8 times the tensor.
        assert_least((5, 3), (uneven,), (Replicate(),))


def test_many_holders_are_one_gather_where_padding_is_little() -> None:
    run_ranks(check_many_holders, 3)


def check_what_stays() -> None:
    """The same cut as another placement."""
    even, columns = RaggedShard((0,), (1, 1)), RaggedShard((0, 1), (1, 1))
    for source, target in [
        ((even,), (Shard(0),)),
        ((Shard(0),), (columns,)),
        ((even,), (columns,)),
        ((RaggedShard.owner(1, 2),), (RaggedShard((0,), (0, 4)),)),
        ((Replicate(),), (even,)),
        ((Replicate(),), (RaggedShard.owner(0, 2),)),
    ]:
        assert assert_least((4, 6), source, target).num_bytes_sent == 0


def test_what_stays_is_not_sent() -> None:
    run_ranks(check_what_stays, 2)


def check_dtypes() -> list[int]:
    """What travels is the tensor's dtype."""
    found = []
    mesh, cut, owner = make_mesh(), RaggedShard((0,), (3, 1)), RaggedShard.owner(1, 2)
    for dtype in (torch.bfloat16, torch.bool, torch.float64, torch.complex64):
        x = RaggedTensor.distribute(numbers((4, 6), dtype), mesh, [cut])
        with Traffic() as traffic:
            redistribute(x, placements=[owner])
        found.append(traffic.num_bytes_sent)
    return found


def test_bytes_by_dtype() -> None:
    # Rank 0 gives its 18 elements away.
    assert run_ranks(check_dtypes, 2) == [[36, 18, 144, 144], [0, 0, 0, 0]]


# --- backward -------------------------------------------------------------------------------------


def check_gradient_of_full_tensor() -> None:
    for cut in (RaggedShard((0,), (1, 1, 1)), RaggedShard((0,), (2, 0, 1))):
        x = lay_out(numbers((3, 4)), make_mesh(), (cut,)).requires_grad_()
        full = x.full_tensor()
        with Traffic() as traffic:
            full.backward(torch.ones(3, 4))
        assert traffic.calls == []


def test_the_gradient_of_the_full_tensor_is_cut_locally() -> None:
    run_ranks(check_gradient_of_full_tensor, 3)


def check_way_back() -> None:
    """The gradient takes the way back: as many bytes as a redistribution from target to source."""
    mesh, at, shape = make_mesh(), (dist.get_rank(),), (6, 2)
    rows, cut = RaggedShard((0,), (1, 3, 2)), RaggedShard((0, 1), (7, 5, 0))
    pairs: list[tuple[Layout, Layout]] = [
        ((rows,), (cut,)),
        ((rows,), (Shard(1),)),
        ((Shard(0),), (cut,)),
        ((Replicate(),), (cut,)),
    ]
    for source, target in pairs:
        x = lay_out(numbers(shape), mesh, source).requires_grad_()
        loss = redistribute(x, placements=target).to_local().sum()
        with Traffic() as traffic:
            loss.backward()
        sent, received = num_elements_moved(shape, target, source, (3,))
        assert traffic.num_bytes_sent == 4 * sent[at], (source, target, traffic)
        assert traffic.num_bytes_received == 4 * received[at], (source, target, traffic)


def test_gradients_move_no_more_than_values() -> None:
    run_ranks(check_way_back, 3)
