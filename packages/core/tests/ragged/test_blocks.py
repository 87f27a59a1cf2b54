"""Blocks: scales are cut where the tensor is, and rows hold the elements of one block each."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard
from vescale_fsdp.ragged.blocks import Blocks, BlockSize, CutBlockError
from vescale_fsdp.ragged.holdings import holding_of, ragged_axis_of, remaining_box

Mesh = tuple[int, ...]


def ids_of(size: BlockSize, shape: tuple[int, ...]) -> Tensor:
    """The number of the block that each element lies in, in the order of the grid."""
    if isinstance(size, tuple) and len(shape) in (2, 3):
        rows, columns = (torch.arange(n) // b for n, b in zip(shape[-2:], size, strict=True))
        in_matrix = rows[:, None] * (int(columns.max()) + 1) + columns
        matrices = torch.arange(math.prod(shape[:-2])).view(*shape[:-2], 1, 1)
        return matrices * (int(in_matrix.max()) + 1) + in_matrix
    n = math.prod(size) if isinstance(size, tuple) else size
    return (torch.arange(math.prod(shape)) // n).view(shape)


def part_of(whole: Tensor, placements: tuple[Placement, ...], mesh: Mesh, at: Mesh) -> Tensor:
    """The local part of a tensor at a coordinate, flat."""
    boxes = holding_of(whole.shape, placements, mesh, at).boxes
    return torch.cat([torch.empty(0), *(box.of(whole).flatten() for box in boxes)])


def is_some_block_cut(ids: Tensor, placements: tuple[Placement, ...], mesh: Mesh) -> bool:
    sizes = ids.flatten().bincount()
    for at in product(*map(range, mesh)):
        found = part_of(ids.float(), placements, mesh, at).long().bincount(minlength=len(sizes))
        if not torch.equal(found[found > 0], sizes[found > 0]):
            return True
    return False


@st.composite
def layouts(draw: st.DrawFn) -> tuple[BlockSize, tuple[int, ...], tuple[Placement, ...], Mesh]:
    """Small tensors on one or two axes; cuts are often, but not always, between blocks."""
    size = draw(st.sampled_from([4, 6, (2, 3), (3, 2)]))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    kinds = [draw(st.sampled_from(["ragged", "shard", "shard", "replicate"])) for _ in mesh]
    placements: list[Placement] = [
        Shard(draw(st.integers(0, len(shape) - 1))) if kind == "shard" else Replicate()
        for kind in kinds
    ]
    if "ragged" in kinds:
        axis = kinds.index("ragged")
        boxes = {
            remaining_box(shape, placements, mesh, at).sizes for at in product(*map(range, mesh))
        }
        box = max(boxes)
        numel = math.prod(box)
        step = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
        cuts = [draw(st.integers(0, numel // step)) * step for _ in range(mesh[axis] - 1)]
        ends = [0, *sorted(cuts), numel]
        runs = [(1, stop - start) for start, stop in pairwise(ends)]
        ragged = RaggedShard.from_runs_of_elements(runs, box)
        ragged = ragged if len(boxes) == 1 else ragged.fixed_in(box)
        split = [
            mesh[a]
            for a, p in enumerate(placements)
            if a > axis and isinstance(p, Shard) and p.dim < len(ragged.dims)
        ]
        placements[axis] = ragged.with_split_factor(math.prod(split))
    return size, shape, tuple(placements), mesh


@settings(max_examples=200, deadline=None)
@example((4, (1, 2, 3), (Shard(0), Shard(0)), (2, 2)))  # one rank has all, of two blocks
@example((2, (5, 4), (RaggedShard((0, 1), (1, 2), elements_per_unit=4), Shard(0)), (2, 2)))
@given(layouts())
def test_scales_lie_with_the_elements_of_their_block(
    layout: tuple[BlockSize, tuple[int, ...], tuple[Placement, ...], Mesh],
) -> None:
    size, shape, placements, mesh = layout
    blocks, ids = Blocks(size, shape), ids_of(size, shape)
    assert math.prod(blocks.grid) == int(ids.max()) + 1
    try:
        grid_placements = blocks.placements(placements, mesh)
    except CutBlockError:
        # On one axis nothing is refused without need, but that a Shard may have to be a range.
        if len(mesh) == 1 and ragged_axis_of(placements) is not None and blocks.tile is None:
            assert is_some_block_cut(ids, placements, mesh)
        return
    assert not is_some_block_cut(ids, placements, mesh)
    grid = torch.arange(math.prod(blocks.grid)).float().view(blocks.grid)
    for at in product(*map(range, mesh)):
        here = part_of(ids.float(), placements, mesh, at)
        scales = part_of(grid, grid_placements, mesh, at)
        box = remaining_box(shape, placements, mesh, at).sizes
        first = 0
        for region in blocks.regions(box, len(here), at_most=12):
            rows = torch.empty(region.num_blocks, blocks.numel)
            blocks.pack(region.of(here + 1), rows)
            mine = scales[first : first + region.num_blocks, None] + 1
            assert bool(((rows == mine) | (rows == 0)).all())
            back = torch.empty(region.shape)
            blocks.unpack(rows, back)
            assert torch.equal(back, region.of(here + 1))
            first += region.num_blocks
        assert first == len(scales)


@pytest.mark.parametrize(
    ("size", "shape", "grid"),
    [
        (256, (6, 512), (6, 2)),  # rows hold whole blocks
        (256, (6, 100), (3,)),  # 256, 256 and 88 elements
        (256, (), (1,)),
        ((4, 32), (6, 100), (2, 4)),
        ((4, 32), (3, 6, 100), (3, 2, 4)),
        ((4, 32), (512,), (4,)),  # vectors have blocks of 128 elements
        ((4, 32), (8, 8, 3, 3), (5,)),  # so have kernels of convolutions: 576 elements
    ],
)
def test_the_grid_has_one_scale_per_block(
    size: BlockSize, shape: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    assert Blocks(size, shape).grid == grid


def test_a_refusal_names_the_cut() -> None:
    with pytest.raises(CutBlockError, match="split after element 300 is not at a multiple of 256"):
        Blocks(256, (1000,)).placements([RaggedShard((0,), (3, 7))], (2,))


def test_the_cost_of_a_placement_does_not_depend_on_the_number_of_ranks() -> None:
    # 2**20 ranks: a loop over them would take seconds.
    num_ranks = 2**20
    placement = RaggedShard.from_interval(0, 512, num_ranks, (num_ranks * 2, 256))
    (found,) = Blocks(256, (num_ranks * 2, 256)).placements([placement], (num_ranks,))
    assert isinstance(found, RaggedShard)
    assert found.runs == ((num_ranks, 1),)
