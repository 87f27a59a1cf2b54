"""Layouts by fake coordinates: no process group."""

import math
import random
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard, compat
from vescale_fsdp.optim.layout import (
    Layout,
    matrices_of,
    order_of_cuts,
    spans_of,
    split_heights,
)
from vescale_fsdp.ragged.holdings import holding_of


def numbered(shape: tuple[int, ...]) -> Tensor:
    """A parameter whose elements are their places."""
    return torch.arange(math.prod(shape)).view(shape)


def local_parts(layout: Layout) -> list[dict[int, Tensor]]:
    """The flat local tensor by rank, of each replica: what `holding_of` says."""
    whole = numbered(layout.shape)
    by_rank = {}
    coordinates = product(*map(range, layout.mesh_shape))
    for rank, coordinate in zip(layout.ranks, coordinates, strict=True):
        boxes = holding_of(layout.shape, layout.placements, layout.mesh_shape, coordinate).boxes
        parts = [box.of(whole).reshape(-1) for box in boxes]
        by_rank[rank] = torch.cat(parts) if parts else whole.new_empty(0)
    return [{p: by_rank[rank] for p, rank in enumerate(row)} for row in layout.grid()]


def assert_parts_make_matrices(layout: Layout, split_rows: int | None = None) -> None:
    """Each matrix is made of its parts, each element once, from every replica."""
    whole = numbered(layout.shape).view(-1)
    matrices = matrices_of(layout, 3, split_rows)
    assert [m.first for m in matrices] == sorted(m.first for m in matrices)
    assert sum(m.numel for m in matrices) == whole.numel()
    for replica in local_parts(layout):
        for matrix in matrices:
            expected = whole[matrix.first : matrix.first + matrix.numel]
            found = torch.full((matrix.rows, matrix.cols), -1)
            for part in matrix.parts:
                view = part.of(found)
                assert (view == -1).all(), "an element has two holders"
                local = replica[part.position][part.local : part.local + part.numel]
                view.copy_(local.view(view.shape))
            assert torch.equal(found.view(-1), expected), (layout, matrix)


SHAPES = [(6, 4), (1, 8), (4, 6, 2), (2, 3, 2, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_cuts(shape: tuple[int, ...]) -> None:
    draw = random.Random(0)
    numel = math.prod(shape)
    for num_ranks in (1, 2, 3, 5, 8) * 4:
        cuts = sorted(draw.choice([0, numel, draw.randrange(numel)]) for _ in range(num_ranks - 1))
        elements = [b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True)]
        ragged = RaggedShard.from_runs_of_elements([(1, n) for n in elements], shape)
        assert_parts_make_matrices(
            Layout(shape, (ragged,), (num_ranks,), tuple(range(num_ranks))), draw.choice([None, 1])
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_shards_and_replicas(shape: tuple[int, ...]) -> None:
    for dim, num_ranks in product(range(len(shape)), (1, 2, 3, 8)):
        ranks = tuple(range(num_ranks))
        assert_parts_make_matrices(Layout(shape, (Shard(dim),), (num_ranks,), ranks))
    assert_parts_make_matrices(Layout(shape, (Replicate(),), (3,), (0, 1, 2)))
    assert_parts_make_matrices(Layout(shape))


# Of a tensor of shape (4, 6, 2), on a mesh of 2 x 2.
MIXED: list[list[Placement]] = [
    [Replicate(), RaggedShard((0,), (1, 3))],
    [RaggedShard((0, 1), (5, 19)), Replicate()],
    [Shard(0), RaggedShard((0,), (1, 1))],
    [Shard(1), RaggedShard((0,), (3, 1))],
    [Shard(2), RaggedShard((0, 1), (7, 17))],
    [RaggedShard((0,), (1, 1), split_factor=2), Shard(0)],
    [RaggedShard((0,), (1, 3)), Shard(1)],
    [RaggedShard((0, 1), (5, 7), split_factor=2), Shard(1)],
    [RaggedShard.owner(1, 2), Shard(2)],
    [Shard(1), Shard(2)],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(1)],
]


@pytest.mark.parametrize("placements", MIXED, ids=str)
@pytest.mark.parametrize("split_rows", [None, 2])
def test_several_axes(placements: list[Placement], split_rows: int | None) -> None:
    assert_parts_make_matrices(
        Layout((4, 6, 2), tuple(placements), (2, 2), (4, 1, 6, 3)), split_rows
    )


@pytest.mark.parametrize(("shape", "dim"), [((3, 6, 2), 0), ((4, 5, 2), 1)])
def test_parts_of_different_sizes(shape: tuple[int, ...], dim: int) -> None:
    """The larger part, of 24 elements, is split after 9; tensor parallelism on either side."""
    fixed = RaggedShard((0, 1, 2), (3, 5), elements_per_unit=3)
    for placements in ([fixed.with_split_factor(2), Shard(dim)], [Shard(dim), fixed]):
        assert_parts_make_matrices(Layout(shape, tuple(placements), (2, 2), (4, 1, 6, 3)))


def test_the_example_of_the_docstring() -> None:
    layout = Layout((2, 2, 4), (RaggedShard((0, 1, 2), (6, 10)),), (2,), (0, 1))
    first, second = matrices_of(layout)
    assert [(p.position, p.local, p.numel, p.start) for p in first.parts] == [
        (0, 0, 6, 0),
        (1, 0, 2, 6),
    ]
    assert [(p.position, p.local, p.numel, p.start) for p in second.parts] == [(1, 2, 8, 0)]


def test_ranks_without_elements_cost_nothing() -> None:
    """A parameter in the middle of ten thousand ranks."""
    ragged = RaggedShard.from_interval(7_000_000, 1000, 10_000, (40, 50))
    assert spans_of((40, 50), (ragged,), (10_000,)) == (
        (7000, ((0, 0, 1000, 1000, 0),)),
        (7001, ((1000, 0, 1000, 1000, 0),)),
    )


def test_columns_of_tensor_parallelism_are_rectangles() -> None:
    layout = Layout((4, 6), (Shard(1),), (2,), (0, 1))
    (matrix,) = matrices_of(layout)
    assert not matrix.has_runs
    assert [(p.start, p.width, p.numel) for p in matrix.parts] == [(0, 3, 12), (3, 3, 12)]


def test_the_grid_has_a_row_for_each_replica() -> None:
    ragged = RaggedShard((0,), (1, 3, 0))
    layout = Layout((4, 6), (Replicate(), ragged), (2, 3), (0, 1, 2, 3, 4, 5))
    assert layout.grid() == ((0, 1, 2), (3, 4, 5))
    layout = Layout((4, 6), (ragged, Replicate()), (3, 2), (5, 4, 3, 2, 1, 0))
    assert layout.grid() == ((5, 3, 1), (4, 2, 0))
    assert layout.members == (0, 1, 2, 3, 4, 5)


def test_a_strided_shard_cuts_after_those_to_its_right() -> None:
    strided = compat.StridedShard(0, split_factor=2)
    assert order_of_cuts([strided, Shard(0)], (3, 2)) == [1, 0]
    assert order_of_cuts([Shard(0), Shard(0)], (3, 2)) == [0, 1]
    assert order_of_cuts([Replicate(), strided, Shard(1), Shard(0)], (2, 3, 2, 2)) == [0, 2, 3, 1]


def test_rows_are_split() -> None:
    assert split_heights(6, None) == [6]
    assert split_heights(6, 2) == [2, 2, 2]
    assert split_heights(6, [3, 1, 2]) == [3, 1, 2]
    layout = Layout((2, 6, 5))
    assert [(m.first, m.rows) for m in matrices_of(layout, 0, [4, 2])] == [
        (0, 4),
        (20, 2),
        (30, 4),
        (50, 2),
    ]


@pytest.mark.parametrize("split_rows", [4, 0, -2, [3, 2], [6, 0], []])
def test_rows_that_do_not_add_up_are_refused(split_rows: int | list[int]) -> None:
    with pytest.raises(ValueError, match="6 rows"):
        split_heights(6, split_rows)


def test_a_vector_is_no_matrix() -> None:
    with pytest.raises(ValueError, match="at least two dimensions"):
        matrices_of(Layout((5,)))


def test_a_parameter_without_elements_has_no_matrices() -> None:
    assert matrices_of(Layout((0, 5))) == []
    assert matrices_of(Layout((3, 5, 0), (Shard(0),), (2,), (0, 1))) == []
