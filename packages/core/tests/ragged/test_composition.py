"""Ragged cuts beside other placements on a 2x2 mesh: what each says, and every way between them.

The axes are called as their usual use: data parallelism outside, tensor parallelism inside.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.testing import run_ranks

from .redistribution import (
    Layout,
    Shape,
    Traffic,
    assert_laid_out,
    combined,
    contribution,
    coordinates,
    held,
    is_ragged,
    lay_out,
    num_elements_moved,
    numbers,
    part_of,
    same_bits,
    whole_numbers,
    wrap,
)

GRID = (2, 2)
# Even, uneven rows, uneven columns, three dimensions, a rank that a Shard leaves nothing.
SHAPES: list[Shape] = [(4, 6), (5, 4), (4, 3), (4, 2, 3), (1, 4)]


def make_grid(names: tuple[str, str] = ("data", "tensor")) -> DeviceMesh:
    return init_device_mesh("cpu", GRID, mesh_dim_names=names)


def units_that_fit(shape: Shape, other: Placement, num_dims: int) -> int:
    """The most units that divide ``num_dims`` dimensions of all that the other axis leaves."""
    left = [held(shape, (other,), (2,), (k,)).shape for k in range(2)]
    return math.gcd(*(math.prod(part[:num_dims]) for part in left if math.prod(part)))


def compositions_of(shape: Shape) -> list[Layout]:
    """A ragged cut on either axis and anything on the other."""
    found: dict[Layout, None] = {}
    others: list[Placement] = [Replicate(), *[Shard(dim) for dim in range(len(shape))]]
    for other, num_dims in product(others, range(len(shape) + 1)):
        total = units_that_fit(shape, other, num_dims)
        for first in {0, total // 3, total}:
            dims, units = range(num_dims), (first, total - first)
            crosses = isinstance(other, Shard) and other.dim < num_dims
            found[(RaggedShard(dims, units, split_factor=2 if crosses else 1), other)] = None
            found[(other, RaggedShard(dims, units))] = None
    for dim in range(len(shape)):  # parts of different sizes, split after as many elements
        parts = [held(shape, (Shard(dim),), (2,), (k,)) for k in range(2)]
        largest = parts[0].numel()
        if parts[1].numel() < largest:
            for first in {largest // 3, largest - 1}:
                units = (first, largest - first)
                fixed = RaggedShard(range(len(shape)), units, elements_per_unit=1)
                found[(fixed.with_split_factor(2), Shard(dim))] = None
                found[(Shard(dim), fixed)] = None
    return list(found)


def plain_layouts(shape: Shape) -> list[Layout]:
    each: list[Placement] = [Replicate(), *[Shard(dim) for dim in range(len(shape))]]
    return list(product(each, each))


# --- what the placements say ----------------------------------------------------------------------


def check_strided_by_example() -> list[list[int]]:
    """Tensor parallelism cut rows 0-2 | 3-5; then each half is cut after two of its three rows."""
    grid, whole = make_grid(), torch.arange(12.0).view(6, 2)
    mine = torch.chunk(whole, 2)[grid.get_local_rank("tensor")]
    mine = mine[:2] if grid.get_local_rank("data") == 0 else mine[2:]
    layout = (RaggedShard((0,), (2, 1), split_factor=2), Shard(0))
    x = RaggedTensor.from_local(mine.reshape(-1), grid, layout, shape=(6, 2))
    assert same_bits(x.full_tensor(), whole)
    assert_laid_out(x, whole, grid, layout)
    y = RaggedTensor.distribute(whole, grid, layout)
    assert same_bits(y.to_local(), mine.reshape(-1))
    return [[int(number) // 2 for number in x.to_local()[::2]]]


def test_the_strided_form_is_the_tensor_cut_and_then_the_ragged_cut() -> None:
    assert run_ranks(check_strided_by_example, 4) == [[[0, 1]], [[3, 4]], [[2]], [[5]]]


def check_columns_by_example() -> None:
    """Columns by tensor parallelism, rows by the ragged cut: they commute, no split_factor."""
    grid, whole = make_grid(), torch.arange(12.0).view(3, 4)
    mine = whole[:1] if grid.get_local_rank("data") == 0 else whole[1:]
    mine = mine[:, :2] if grid.get_local_rank("tensor") == 0 else mine[:, 2:]
    layout = (RaggedShard((0,), (1, 2)), Shard(1))
    x = RaggedTensor.from_local(mine.reshape(-1), grid, layout, shape=(3, 4))
    assert same_bits(x.full_tensor(), whole)
    assert same_bits(RaggedTensor.distribute(whole, grid, layout).to_local(), mine.reshape(-1))


def test_columns_and_ragged_rows() -> None:
    run_ranks(check_columns_by_example, 4)


def check_tensor_parallel_layer() -> None:
    """FSDP over tensor parallelism: the columns' DTensor part is what is cut raggedly."""
    grid = make_grid()
    for dim, cut in [
        (0, RaggedShard((0,), (1, 2), split_factor=2)),
        (1, RaggedShard((0,), (1, 5))),
        (1, RaggedShard((0, 1), (5, 7), split_factor=2)),
    ]:
        whole = numbers((6, 4))
        tensor_parallel = distribute_tensor(whole, grid["tensor"], [Shard(dim)], src_data_rank=None)
        storage = tensor_parallel.to_local().contiguous().view(-1)
        units = cut.local_units
        length = storage.numel() * units[0] // sum(units)
        mine = storage[:length] if grid.get_local_rank("data") == 0 else storage[length:]
        x = RaggedTensor.from_local(mine, grid, [cut, Shard(dim)], shape=(6, 4))
        assert same_bits(x.full_tensor(), whole)
        gathered = redistribute(x, placements=[Replicate(), Shard(dim)])
        assert same_bits(gathered.to_local(), tensor_parallel.to_local())


def test_a_ragged_cut_of_a_tensor_parallel_part() -> None:
    run_ranks(check_tensor_parallel_layer, 4)


def check_every_composition() -> None:
    for names in [("replicate", "shard"), ("data", "tensor")]:
        grid = make_grid(names)
        for shape in SHAPES:
            whole = numbers(shape)
            for layout in compositions_of(shape):
                x = RaggedTensor.distribute(whole, grid, layout)
                assert_laid_out(x, whole, grid, layout)
                assert x.ragged_placement in layout
                assert x.ragged_axis == layout.index(x.ragged_placement)
                if names == ("data", "tensor"):
                    assert same_bits(x.full_tensor(), whole), layout


def test_every_composition_holds_its_parts_and_gathers() -> None:
    run_ranks(check_every_composition, 4)


# --- redistribution -------------------------------------------------------------------------------


def check_walk(shape: Shape) -> None:
    """From each composition to another one, to a plain layout and back."""
    grid, whole = make_grid(), numbers(shape)
    ragged, plain = compositions_of(shape), plain_layouts(shape)
    for step in (1, 5, 11):
        x = lay_out(whole, grid, ragged[0])
        for index in range(0, len(ragged), step if step > 1 else 2):
            other = ragged[(index * 7 + step) % len(ragged)]
            between = plain[(index + step) % len(plain)]
            for target in (other, between, ragged[index]):
                x = redistribute(x, placements=target)
                assert_laid_out(x, whole, grid, target)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.sampled(1)
def test_any_layout_becomes_any_other(shape: Shape) -> None:
    run_ranks(check_walk, 4, shape)


# The ones of the issue, for a tensor of (4, 6).
NAMED: list[Layout] = [
    (Replicate(), RaggedShard((0,), (1, 3))),
    (RaggedShard((0, 1), (5, 19)), Replicate()),
    (RaggedShard((0,), (1, 1), split_factor=2), Shard(0)),
    (RaggedShard((0, 1), (1, 5), split_factor=2), Shard(0)),
    (RaggedShard((0,), (3, 1)), Shard(1)),
    (Shard(0), RaggedShard((0, 1), (7, 5))),
    (Shard(1), RaggedShard((0,), (1, 3))),
    (Shard(1), RaggedShard.owner(1, 2)),
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
]
PAIRS = [(x, y) for x in NAMED for y in NAMED if x != y and (is_ragged(x) or is_ragged(y))]


def check_all_pairs() -> None:
    grid, whole = make_grid(), numbers((4, 6))
    for source, target in PAIRS:
        x = redistribute(lay_out(whole, grid, source), placements=target)
        assert_laid_out(x, whole, grid, target)


def test_all_pairs_of_the_named_layouts() -> None:
    run_ranks(check_all_pairs, 4)


def check_async() -> None:
    grid, whole = make_grid(), numbers((4, 6))
    for start in range(0, len(PAIRS), 8):
        batch = PAIRS[start : start + 8]
        flying = [
            redistribute(lay_out(whole, grid, source), placements=target, async_op=True)
            for source, target in batch
        ]
        for x, (_, target) in reversed(list(zip(flying, batch, strict=True))):
            assert_laid_out(x, whole, grid, target)


def test_eight_at_a_time_in_flight() -> None:
    run_ranks(check_async, 4)


def check_gradients() -> None:
    """As on one axis: each part's weights in the target come back as parts of the source."""
    grid = make_grid()
    whole, weight = whole_numbers((4, 6), 1), whole_numbers((4, 6), 2)
    for source, target in PAIRS:
        x = lay_out(whole, grid, source).detach().requires_grad_()
        y = redistribute(x, placements=target)
        (y.to_local() * part_of(weight, grid, target)).sum().backward()
        assert_laid_out(x.grad, weight, grid, source)
        if is_ragged(source):
            x.grad = None
            (x.full_tensor() * weight).sum().backward()
            assert_laid_out(x.grad, weight, grid, source)


@pytest.mark.nightly
def test_gradients_of_all_pairs() -> None:
    run_ranks(check_gradients, 4)


def check_order_of_ranks() -> None:
    """A mesh whose coordinates are not in the order of the ranks."""
    grid = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("data", "tensor"))
    whole = numbers((4, 6))
    for source, target in PAIRS[::3]:
        x = redistribute(lay_out(whole, grid, source), placements=target)
        assert_laid_out(x, whole, grid, target)


def test_a_mesh_in_another_order() -> None:
    run_ranks(check_order_of_ranks, 4)


def check_three_axes() -> None:
    """Replicas, a ragged axis and a tensor-parallel one; one of them over one rank."""
    whole = numbers((4, 6))
    rows, columns = (
        RaggedShard((0,), (1, 1), split_factor=2),
        RaggedShard((0, 1), (5, 7), split_factor=2),
    )
    for sizes, layouts in [
        ((1, 2, 2), [(Replicate(), rows, Shard(0)), (Shard(0), columns, Shard(1))]),
        ((2, 2, 1), [(Replicate(), RaggedShard((0,), (1, 3)), Replicate())]),
        ((2, 1, 2), [(Shard(1), RaggedShard.owner(0, 1), Shard(0))]),
    ]:
        grid = init_device_mesh("cpu", sizes)
        plain: Layout = (Shard(0), Replicate(), Shard(1))
        for layout in layouts:
            x = lay_out(whole, grid, layout)
            assert same_bits(x.full_tensor(), whole)
            y = redistribute(x, placements=plain)
            assert_laid_out(y, whole, grid, plain)
            assert_laid_out(redistribute(y, placements=layout), whole, grid, layout)


def test_three_axes() -> None:
    run_ranks(check_three_axes, 4)


# --- partial --------------------------------------------------------------------------------------


def check_partial() -> None:
    """Sums over one axis: the result may be ragged on the same axis or on the other."""
    grid, shape = make_grid(), (4, 6)
    rows, cut = RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (7, 17))
    strided = RaggedShard((0,), (1, 1), split_factor=2)
    for source, targets in [
        (
            (Partial(), rows),
            [(Replicate(), rows), (Replicate(), cut), (cut, Replicate()), (strided, Shard(0))],
        ),
        ((rows, Partial()), [(rows, Replicate()), (cut, Replicate()), (rows, Shard(1))]),
        ((Partial(), Replicate()), [(cut, Replicate()), (Replicate(), cut), (rows, Shard(1))]),
        ((Partial(), Shard(0)), [(strided, Shard(0)), (cut, Replicate()), (rows, Shard(1))]),
        ((Shard(0), Partial()), [(Shard(0), RaggedShard((0,), (0, 1))), (Replicate(), rows)]),
        ((Partial(), rows), [(Replicate(), Replicate()), (Shard(0), Shard(1))]),
        ((Partial(), Partial()), [(rows, Replicate()), (Replicate(), cut), (rows, Shard(1))]),
    ]:
        parts = {at: contribution(shape, index) for index, at in enumerate(coordinates(GRID))}
        summed = [isinstance(placement, Partial) for placement in source]
        # Ranks that differ on summed axes only contribute to the same sum.
        own = {
            at: parts[tuple(k if is_sum else 0 for k, is_sum in zip(at, summed, strict=True))]
            for at in parts
        }
        whole = combined(list({id(part): part for part in own.values()}.values()), "sum")
        for target in targets:
            x = lay_out(own[tuple(grid.get_coordinate())], grid, source)
            assert_laid_out(redistribute(x, placements=target), whole, grid, target)
            if is_ragged(source):
                assert same_bits(x.full_tensor(), whole)


def test_partial_sums_beside_a_ragged_cut() -> None:
    run_ranks(check_partial, 4)


def check_partial_that_stays() -> None:
    """What remains partial is moved as it is, contribution by contribution."""
    grid, shape = make_grid(), (4, 6)
    mine = contribution(shape, grid.get_local_rank("data"))
    rows, cut = RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (7, 17))
    ways: list[tuple[Layout, Layout]] = [
        ((Partial(), rows), (Partial(), cut)),
        ((Partial(), Replicate()), (Partial(), cut)),
        ((Partial(), rows), (Partial(), Replicate())),
        ((Partial(), Shard(0)), (Partial(), rows)),
        ((Partial("max"), rows), (Partial("max"), Shard(1))),
    ]
    for source, target in ways:
        x = redistribute(lay_out(mine, grid, source), placements=target)
        assert_laid_out(x, mine, grid, target)


def test_what_stays_partial_is_only_moved() -> None:
    run_ranks(check_partial_that_stays, 4)


def check_partial_gradients() -> None:
    """Of a partial source: replicated, as DTensor has it. Of `grad_placements`: summed."""
    grid = make_grid()
    rows, weight = RaggedShard((0,), (1, 3)), contribution((4, 6), 9)
    local = part_of(contribution((4, 6), 0), grid, (Partial(), rows)).requires_grad_()
    x = wrap(local, weight, grid, (Partial(), rows))
    target: Layout = (Replicate(), rows)
    (redistribute(x, placements=target).to_local() * part_of(weight, grid, target)).sum().backward()
    assert same_bits(local.grad, part_of(weight, grid, target))

    weights = [contribution((4, 6), rank) for rank in range(4)]
    replica = grid.get_local_rank("data")
    for layout, placements, whole in [
        ((Replicate(), rows), [Partial(), Partial()], combined(weights, "sum")),
        (
            (Replicate(), rows),
            [Replicate(), Partial()],
            combined(weights[2 * replica : 2 * replica + 2], "sum"),
        ),
        (
            (RaggedShard((0,), (1, 1), split_factor=2), Shard(0)),
            [Partial(), Partial()],
            combined(weights, "sum"),
        ),
    ]:
        y = lay_out(weight, grid, layout).detach().requires_grad_()
        full = y.full_tensor(grad_placements=placements)
        (full * weights[dist.get_rank()]).sum().backward()
        assert_laid_out(y.grad, whole, grid, layout)


def test_gradients_of_partial_sums() -> None:
    run_ranks(check_partial_gradients, 4)


# --- bytes ----------------------------------------------------------------------------------------


def is_shard_elsewhere(source: Layout, target: Layout) -> bool:
    """The ragged axis becomes replicated, and the other one has another ``Shard``."""
    return any(
        isinstance(before, RaggedShard)
        and after == Replicate()
        and any(isinstance(now, Shard) and now not in source for now in target)
        for before, after in zip(source, target, strict=True)
    )


def check_bytes(elsewhere: bool) -> list[tuple[Layout, Layout, int, int]]:
    """Pairs where this rank receives more or less than it needs and lacks."""
    grid, shape, wrong = make_grid(), (4, 6), []
    at = tuple(grid.get_coordinate())
    for source, target in PAIRS:
        if is_shard_elsewhere(source, target) != elsewhere:
            continue
        x = lay_out(numbers(shape), grid, source)
        with Traffic() as traffic:
            redistribute(x, placements=target).to_local().sum()
        _, received = num_elements_moved(shape, source, target, GRID)
        if traffic.num_bytes_received != 4 * received[at]:
            wrong.append((source, target, traffic.num_bytes_received, 4 * received[at]))
    return wrong


def test_a_rank_receives_what_it_needs_and_lacks() -> None:
    assert run_ranks(check_bytes, 4, False) == [[], [], [], []]


def test_a_rank_receives_what_it_needs_and_lacks_of_a_shard_on_another_axis() -> None:
    assert run_ranks(check_bytes, 4, True) == [[], [], [], []]


def check_hybrid() -> None:
    """HSDP: replicas do not talk to each other when one of them gathers or cuts anew."""
    grid = make_grid(("replicate", "shard"))
    rows, cut = RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (7, 17))
    x = lay_out(numbers((4, 6)), grid, (Replicate(), rows))
    own = x.to_local().numel()
    with Traffic() as traffic:
        x.full_tensor()
    assert traffic.num_bytes_received == 4 * (24 - own)
    assert traffic.num_bytes_sent == 4 * own
    with Traffic() as traffic:
        redistribute(x, placements=[Replicate(), cut])
    # The first of the two ranks lacks one element: it holds 6 and gets the seventh.
    assert (traffic.num_bytes_sent, traffic.num_bytes_received) == ((0, 4) if own == 6 else (4, 0))
    whole = lay_out(numbers((4, 6)), grid, (Replicate(), Replicate()))
    with Traffic() as traffic:
        redistribute(whole, placements=[Replicate(), cut])
        redistribute(whole, placements=[cut, Replicate()])
        redistribute(whole, placements=[RaggedShard((0,), (1, 1), split_factor=2), Shard(0)])
    assert traffic.calls == []


def test_replicas_do_not_talk_to_each_other() -> None:
    run_ranks(check_hybrid, 4)


def check_reduction() -> None:
    """(Partial, Shard) -> (Ragged, Shard), the gradient of a tensor-parallel weight."""
    grid = make_grid()
    for shard, cut in [
        (Shard(0), RaggedShard((0, 1), (5, 7), split_factor=2)),
        (Shard(1), RaggedShard((0,), (1, 3))),
    ]:
        x = lay_out(contribution((4, 6), dist.get_rank() // 2), grid, (Partial(), shard))
        with Traffic() as traffic:
            y = redistribute(x, placements=[cut, shard])
        own = y.to_local().numel()
        assert (traffic.num_bytes_sent, traffic.num_bytes_received) == (4 * (12 - own), 4 * own)
        assert not any("reduce" in call for call in traffic.calls)


def test_a_partial_tensor_parallel_gradient_is_reduced_along_its_axis() -> None:
    run_ranks(check_reduction, 4)
