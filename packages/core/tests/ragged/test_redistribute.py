"""Redistribution on one axis: every cut of small tensors, against the dense tensor, bit for bit."""

from __future__ import annotations

import random as choice

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh
from .redistribution import (
    Layout,
    Shape,
    Traffic,
    assert_laid_out,
    lay_out,
    numbers,
    part_of,
    same_bits,
    unit_vectors,
)

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
SHAPES: list[Shape] = [(3,), (4, 2), (2, 3), (2, 2, 2), (), (0, 3), (5, 1)]


def all_cuts() -> list[tuple[Shape, list[RaggedShard]]]:
    """With each shape, each way to cut it for this world size."""
    size = dist.get_world_size()
    shapes = [shape for shape in SHAPES if size < 4 or shape != (4, 2)]  # as (2, 2, 2), for time
    return [(shape, unit_vectors(shape, size)) for shape in shapes]


def plain_layouts(shape: Shape) -> list[Layout]:
    return [(Replicate(),), *[(Shard(dim),) for dim in range(len(shape))]]


# --- the oracle -----------------------------------------------------------------------------------


def test_unit_vectors_are_all_and_none_twice() -> None:
    # 1, 4 and 8 units among four ranks: C(1 + 3, 3), C(4 + 3, 3) and C(8 + 3, 3) ways.
    assert len(unit_vectors((4, 2), 4)) == 4 + 35 + 165
    assert unit_vectors((), 2) == [RaggedShard.owner(1, 2), RaggedShard.owner(0, 2)]
    # Nothing to hold: no units, or any of an owner.
    assert RaggedShard((0,), (0, 0)) in unit_vectors((0, 3), 2)


# --- ragged to ragged -----------------------------------------------------------------------------


def check_walk() -> None:
    """From each cut to the next of a shuffled round."""
    mesh = make_mesh()
    for shape, cuts in all_cuts():
        whole, order = numbers(shape), list(cuts)
        choice.Random(0).shuffle(order)
        x = lay_out(whole, mesh, (order[-1],))
        for target in order:
            x = redistribute(x, placements=[target])
            assert_laid_out(x, whole, mesh, (target,))


@WORLD_SIZES
def test_any_cut_is_reached_and_left(world_size: int) -> None:
    run_ranks(check_walk, world_size)


def check_all_pairs() -> None:
    mesh = make_mesh()
    for shape, cuts in all_cuts():
        whole = numbers(shape)
        for source in cuts:
            x = lay_out(whole, mesh, (source,))
            for target in cuts:
                assert_laid_out(redistribute(x, placements=[target]), whole, mesh, (target,))


def test_all_pairs_of_cuts_on_two_ranks() -> None:
    run_ranks(check_all_pairs, 2)


def check_a_cut_to_itself() -> None:
    mesh, whole = make_mesh(), numbers((6, 2))
    x = lay_out(whole, mesh, (RaggedShard((0,), (2, 4)),))
    with Traffic() as traffic:
        assert redistribute(x, placements=[RaggedShard((0,), (1, 2))]) is x
    assert traffic.calls == []
    target = RaggedShard((0, 1), (4, 8))  # the same cut in other words
    with Traffic() as traffic:
        assert_laid_out(redistribute(x, placements=[target]), whole, mesh, (target,))
    assert traffic.num_bytes_sent == 0


def test_a_common_factor_is_no_other_placement() -> None:
    run_ranks(check_a_cut_to_itself, 2)


# --- to and from what torch knows -----------------------------------------------------------------


def check_to_plain_and_back() -> None:
    mesh = make_mesh()
    for shape, cuts in all_cuts():
        whole = numbers(shape)
        for cut in cuts[:: 1 + len(cuts) // 20]:
            x = lay_out(whole, mesh, (cut,))
            for layout in plain_layouts(shape):
                plain = redistribute(x, placements=layout)
                assert_laid_out(plain, whole, mesh, layout)
                back = redistribute(plain, placements=[cut])
                assert_laid_out(back, whole, mesh, (cut,))


@WORLD_SIZES
def test_any_cut_becomes_a_plain_placement_and_back(world_size: int) -> None:
    run_ranks(check_to_plain_and_back, world_size)


def check_full_tensor() -> None:
    mesh = make_mesh()
    for shape, cuts in all_cuts():
        whole = numbers(shape)
        for cut in cuts:
            full = lay_out(whole, mesh, (cut,)).full_tensor()
            assert type(full) is Tensor
            assert full.is_contiguous()
            assert same_bits(full, whole), cut


@WORLD_SIZES
def test_full_tensor_of_any_cut(world_size: int) -> None:
    run_ranks(check_full_tensor, world_size)


def check_from_replicate() -> None:
    mesh = make_mesh()
    for shape, cuts in all_cuts():
        whole = numbers(shape)
        replicated = lay_out(whole, mesh, (Replicate(),))
        with Traffic() as traffic:
            for cut in cuts:
                x = redistribute(replicated, placements=[cut])
                assert_laid_out(x, whole, mesh, (cut,))
            for cut in cuts[::4]:
                assert_laid_out(RaggedTensor.distribute(whole, mesh, [cut]), whole, mesh, (cut,))
        assert traffic.calls == []


@WORLD_SIZES
def test_replicate_becomes_any_cut_without_communication(world_size: int) -> None:
    run_ranks(check_from_replicate, world_size)


def check_uneven_chunks() -> None:
    """Shard gives the last ranks shorter chunks or none; ragged cuts fit in between."""
    mesh, size = make_mesh(), dist.get_world_size()
    for shape in [(7, 3), (1, 5), (2, 9), (3, 2, 5)]:
        whole = numbers(shape)
        for cut in unit_vectors(shape[:1], size)[::3]:
            for dim in range(len(shape)):
                x = redistribute(lay_out(whole, mesh, (Shard(dim),)), placements=[cut])
                assert_laid_out(x, whole, mesh, (cut,))
                y = redistribute(x, placements=[Shard(dim)])
                assert_laid_out(y, whole, mesh, (Shard(dim),))


@WORLD_SIZES
def test_chunks_of_unequal_length(world_size: int) -> None:
    run_ranks(check_uneven_chunks, world_size)


def check_torch_distributed() -> None:
    """The plain side as torch makes it, and used as torch uses it."""
    mesh, whole = make_mesh(), numbers((5, 4), torch.float64)
    cut = RaggedShard((0, 1), (3, 10, 7))
    for placement in (Shard(0), Shard(1), Shard(-1), Replicate()):
        plain = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        x = redistribute(plain, mesh, [cut])
        assert_laid_out(x, whole, mesh, (cut,))
        y = redistribute(x, mesh, [placement])
        assert type(y) is DTensor
        assert same_bits(y.full_tensor(), whole)
        assert same_bits((y + y).full_tensor(), whole + whole)


def test_plain_tensors_as_torch_distributes_them() -> None:
    run_ranks(check_torch_distributed, 3)


def check_strides() -> None:
    """A DTensor may be a transposed view; a ragged tensor is contiguous."""
    mesh, whole = make_mesh(), numbers((4, 6))
    cut = RaggedShard((0, 1), (5, 19))
    for placement in (Shard(0), Shard(1), Replicate()):
        columns = distribute_tensor(whole.t().contiguous(), mesh, [placement], src_data_rank=None)
        turned = columns.t()
        assert turned.stride() == (1, 4)
        x = redistribute(turned, placements=[cut])
        assert_laid_out(x, whole, mesh, (cut,))
        assert same_bits(redistribute(x, placements=[Shard(1)]).full_tensor(), whole)


def test_transposed_tensors() -> None:
    run_ranks(check_strides, 2)


# --- meshes ---------------------------------------------------------------------------------------


def check_order_of_ranks() -> None:
    """The coordinate on the mesh decides, not the rank."""
    for order in ([2, 0, 1], [1, 2, 0], [2, 1, 0]):
        mesh = DeviceMesh("cpu", order)
        for shape in [(6, 2), (5, 1)]:
            whole = numbers(shape)
            x = lay_out(whole, mesh, (RaggedShard.owner(0, 3),))
            targets: list[Layout] = [(cut,) for cut in unit_vectors(shape, 3)[::7]]
            for target in [*targets, (Shard(0),), *targets[::-1]]:
                x = redistribute(x, placements=target)
                assert_laid_out(x, whole, mesh, target)
                if isinstance(x, RaggedTensor):
                    assert same_bits(x.full_tensor(), whole)


def test_meshes_that_are_not_in_the_order_of_ranks() -> None:
    run_ranks(check_order_of_ranks, 3)


def check_part_of_a_mesh() -> None:
    """Rows of a mesh are meshes of their own, with different tensors."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name in ("outer", "inner"):
        mesh = grid[name]
        whole = numbers((4, 3), seed=dist.get_rank() // 2 if name == "inner" else 9)
        cut, other = RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (7, 5))
        x = redistribute(lay_out(whole, mesh, (cut,)), placements=[other])
        assert_laid_out(x, whole, mesh, (other,))
        assert_laid_out(redistribute(x, placements=[Shard(1)]), whole, mesh, (Shard(1),))
        assert same_bits(x.full_tensor(), whole)


def test_one_axis_of_a_mesh_of_two() -> None:
    run_ranks(check_part_of_a_mesh, 4)


# --- what the result is ---------------------------------------------------------------------------


def check_dtypes() -> None:
    mesh = make_mesh()
    first, second = RaggedShard((0, 1), (4, 11, 0)), RaggedShard((0,), (1, 0, 4))
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ):
        whole = numbers((5, 3), dtype)
        x = lay_out(whole, mesh, (first,))
        for layout in [(second,), (Shard(1),), (first,), (Shard(0),), (second,), (Replicate(),)]:
            x = redistribute(x, placements=layout)
            assert_laid_out(x, whole, mesh, layout)
        x = redistribute(x, placements=[first])
        assert_laid_out(x, whole, mesh, (first,))
        assert same_bits(x.full_tensor(), whole)


def test_dtypes() -> None:
    run_ranks(check_dtypes, 3)


def check_memory_is_its_own() -> None:
    mesh, whole = make_mesh(), numbers((4, 2))
    cut, other = RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (2, 6))
    layouts: list[Layout] = [(cut,), (other,), (Shard(0),), (Replicate(),)]
    for source in layouts:
        for target in layouts:
            if source == target or not (is_cut(source) or is_cut(target)):
                continue
            x = lay_out(whole, mesh, source)
            y = redistribute(x, placements=target)
            y.to_local().fill_(5)
            assert_laid_out(x, whole, mesh, source)
            assert y.to_local().untyped_storage().nbytes() == y.to_local().nbytes


def is_cut(layout: Layout) -> bool:
    return isinstance(layout[0], RaggedShard)


def test_the_result_has_memory_of_its_own_and_no_more_than_its_part() -> None:
    run_ranks(check_memory_is_its_own, 2)


def check_local_parts() -> None:
    mesh = make_mesh()
    whole = numbers((4, 2))
    for cut in unit_vectors((4, 2), dist.get_world_size()):
        local = part_of(whole, mesh, (cut,))
        x = RaggedTensor.from_local(local, mesh, [cut], shape=(4, 2))
        assert x.to_local().data_ptr() == local.data_ptr()
        assert same_bits(x.to_local(), local)
        assert x.local_range[1] - x.local_range[0] == local.numel()


def test_from_local_and_to_local_are_inverse() -> None:
    run_ranks(check_local_parts, 3)
