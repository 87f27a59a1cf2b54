"""``async_op=True``: the same tensors, which arrive when somebody reads them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_fsdp import RaggedShard
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh
from .redistribution import (
    Layout,
    assert_laid_out,
    combined,
    contribution,
    lay_out,
    numbers,
    part_of,
    same_bits,
    unit_vectors,
    whole_numbers,
)

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def pairs(shape: tuple[int, ...]) -> list[tuple[Layout, Layout]]:
    """Ragged and plain layouts, one of each pair ragged."""
    cuts = unit_vectors(shape, dist.get_world_size())
    ragged: list[Layout] = [(cut,) for cut in cuts[:: 1 + len(cuts) // 4]]
    plain: list[Layout] = [(Replicate(),), *[(Shard(dim),) for dim in range(len(shape))]]
    both = [(x, y) for x in ragged for y in plain]
    return [*both, *[(y, x) for x, y in both], *[(x, y) for x in ragged for y in ragged]]


def check_same() -> None:
    mesh = make_mesh()
    for shape in [(4, 2), (5,), (), (0, 3)]:
        whole = numbers(shape)
        for source, target in pairs(shape):
            y = redistribute(lay_out(whole, mesh, source), placements=target, async_op=True)
            assert_laid_out(y, whole, mesh, target)


@WORLD_SIZES
def test_the_result_is_that_of_the_synchronous_call(world_size: int) -> None:
    run_ranks(check_same, world_size)


def check_many_in_flight() -> None:
    """All are started before the first is read, and they are read in the opposite order."""
    mesh = make_mesh()
    whole = numbers((4, 2))
    started = []
    for source, target in pairs((4, 2)):
        x = lay_out(whole, mesh, source)
        started.append((redistribute(x, placements=target, async_op=True), target))
        del x  # what is in flight keeps its memory
    for y, target in reversed(started):
        assert_laid_out(y, whole, mesh, target)


@WORLD_SIZES
def test_many_in_flight(world_size: int) -> None:
    run_ranks(check_many_in_flight, world_size)


def check_two() -> None:
    mesh, first, second = make_mesh(), numbers((6, 2), seed=1), numbers((6, 2), seed=2)
    rows, cut = RaggedShard((0,), (1, 3, 2)), RaggedShard((0, 1), (5, 0, 7))
    for target in [(cut,), (Replicate(),), (Shard(0),), (Shard(1),)]:
        x = redistribute(lay_out(first, mesh, (rows,)), placements=target, async_op=True)
        y = redistribute(lay_out(second, mesh, (rows,)), placements=target, async_op=True)
        assert_laid_out(y + x, second + first, mesh, target)  # each is read by the operator
        assert_laid_out(x, first, mesh, target)


def test_two_in_flight_meet_in_an_operator() -> None:
    run_ranks(check_two, 3)


def check_use_at_once() -> None:
    mesh, whole = make_mesh(), whole_numbers((6, 2))
    rows, cut = RaggedShard((0,), (1, 5)), RaggedShard((0, 1), (7, 5))
    for target in [(cut,), (Replicate(),), (Shard(0),), (Shard(1),)]:
        source = lay_out(whole, mesh, (rows,))

        def start(source=source, target=target):  # type: ignore[no-untyped-def]
            return redistribute(source, placements=target, async_op=True)

        assert_laid_out(start() * 2, whole * 2, mesh, target)
        assert_laid_out(start().mul_(2), whole * 2, mesh, target)
        assert_laid_out(start().detach(), whole, mesh, target)
        assert_laid_out(start().clone(), whole, mesh, target)
        assert_laid_out(redistribute(start(), placements=[cut]), whole, mesh, (cut,))
        assert same_bits(start().full_tensor(), whole)
        assert same_bits(start().to_local() + 1, part_of(whole, mesh, target) + 1)
        assert same_bits(start()._local_tensor.wait(), part_of(whole, mesh, target))
        torch._foreach_mul_([start()], 2)
        assert "RaggedTensor" in repr(start()) or "DTensor" in repr(start())


def test_a_result_is_usable_at_once() -> None:
    run_ranks(check_use_at_once, 2)


def check_never_read() -> None:
    """What nobody reads finishes all the same, and does not disturb what follows."""
    mesh, whole = make_mesh(), numbers((6, 2))
    rows, cut = RaggedShard((0,), (1, 5)), RaggedShard((0, 1), (7, 5))
    for target in [(cut,), (Replicate(),), (Shard(1),)] * 3:
        redistribute(lay_out(whole, mesh, (rows,)), placements=target, async_op=True)
        x = redistribute(lay_out(whole, mesh, (cut,)), placements=[rows])
        assert_laid_out(x, whole, mesh, (rows,))


def test_a_result_that_nobody_reads() -> None:
    run_ranks(check_never_read, 2)


def check_partial() -> None:
    mesh, size = make_mesh(), dist.get_world_size()
    parts = [contribution((4, 3), rank) for rank in range(size)]
    for reduce_op in ("sum", "avg", "max"):
        started = [
            (
                redistribute(
                    lay_out(parts[dist.get_rank()], mesh, (Partial(reduce_op),)),
                    placements=[cut],
                    async_op=True,
                ),
                cut,
            )
            for cut in unit_vectors((4, 3), size)[::17]
        ]
        for x, cut in started:
            assert_laid_out(x, combined(parts, reduce_op), mesh, (cut,))


def test_partial_values() -> None:
    run_ranks(check_partial, 3)


def check_gradients() -> None:
    mesh = make_mesh()
    whole, weight = whole_numbers((4, 2), 1), whole_numbers((4, 2), 2)
    for source, target in pairs((4, 2)):
        x = lay_out(whole, mesh, source).detach().requires_grad_()
        y = redistribute(x, placements=target, async_op=True)
        ((y * y).to_local() * part_of(weight, mesh, target)).sum().backward()
        assert_laid_out(x.grad, 2 * whole * weight, mesh, source)


def test_gradients() -> None:
    run_ranks(check_gradients, 2)
