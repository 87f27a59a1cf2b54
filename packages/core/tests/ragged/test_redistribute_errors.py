"""What cannot be redistributed is refused on every rank, before any communication."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh
from .redistribution import Traffic, lay_out, numbers, wrap

ROWS = RaggedShard((0,), (1, 3))


def assert_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with Traffic() as traffic, pytest.raises(error, match=message):
        call()
    assert traffic.calls == []


def sources() -> list[DTensor]:
    mesh, whole = make_mesh(), numbers((4, 6))
    placements: list[Placement] = [ROWS, RaggedShard.owner(0, 2), Shard(0), Shard(1), Replicate()]
    return [
        *[lay_out(whole, mesh, (placement,)) for placement in placements],
        wrap(whole, whole, mesh, (Partial(),)),
    ]


WRONG_TARGETS: list[tuple[list[Placement], type[Exception], str]] = [
    ([RaggedShard((0,), (1, 1, 2))], ValueError, "for 3 ranks, but axis 0 of the mesh has 2"),
    ([RaggedShard((0,), (4,))], ValueError, "for 1 ranks, but axis 0 of the mesh has 2"),
    ([RaggedShard((0,), (1, 2))], ValueError, r"does not fit a tensor of shape \(4, 6\).* 3 units"),
    ([RaggedShard((0, 1), (3, 4))], ValueError, r"7 units .* which is 24"),
    ([RaggedShard((0, 1, 2), (1, 1))], ValueError, "does not fit a tensor of shape"),
    ([RaggedShard((), (1, 1))], ValueError, "its 2 units must divide"),
    ([RaggedShard((0,), (0, 0))], ValueError, "its 0 units must divide"),
    ([ROWS, Replicate()], ValueError, "one placement per axis"),
    ([RaggedShard((0,), (1, 3), split_factor=2)], ValueError, "split_factor"),
]


def check_wrong_targets() -> None:
    for source in sources():
        for target, error, message in WRONG_TARGETS:
            assert_refused(lambda: redistribute(source, placements=target), error, message)  # noqa: B023


def test_ragged_targets_that_do_not_fit() -> None:
    run_ranks(check_wrong_targets, 2)


def check_partial_targets() -> None:
    x = lay_out(numbers((4, 6)), make_mesh(), (ROWS,))
    for reduce_op in ("sum", "avg", "max"):
        assert_refused(
            lambda: redistribute(x, placements=[Partial(reduce_op)]),  # noqa: B023
            RuntimeError,
            rf"from RaggedShard\(.*\) to P.*{reduce_op}",
        )


def test_nothing_becomes_partial() -> None:
    run_ranks(check_partial_targets, 2)


def check_plain_targets() -> None:
    x = lay_out(numbers((4, 6)), make_mesh(), (ROWS,))
    wrong: list[list[Placement]] = [[Shard(2)], [Shard(-3)], [Shard(0), Shard(1)], []]
    for target in wrong:
        assert_refused(lambda: redistribute(x, placements=target), ValueError, r"\S")  # noqa: B023


def test_plain_targets_that_do_not_fit() -> None:
    run_ranks(check_plain_targets, 2)


def check_other_mesh() -> None:
    grid = init_device_mesh("cpu", (1, 2))
    for source in sources():
        assert_refused(
            lambda: redistribute(source, grid, [Replicate(), ROWS]),  # noqa: B023
            NotImplementedError,
            "another mesh",
        )


def test_another_mesh() -> None:
    run_ranks(check_other_mesh, 2)


@pytest.mark.parametrize(
    ("dims", "units", "split_factor", "message"),
    [
        ((0,), (-1, 2), 1, "not be negative, got -1"),
        ((0,), (2, -1, 2), 1, "not be negative, got -1"),
        ((1,), (1, 2), 1, r"prefix \(0, 1, ...\) of the dimensions, got \(1,\)"),
        ((0, 2), (1, 2), 1, r"prefix .* got \(0, 2\)"),
        ((1, 0), (1, 2), 1, r"prefix .* got \(1, 0\)"),
        ((0,), (), 1, "at least one rank"),
        ((0,), (1, 2), 0, "split_factor"),
        ((0,), (1, 2), -2, "split_factor"),
    ],
)
def test_placements_that_are_none(
    dims: tuple[int, ...], units: tuple[int, ...], split_factor: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RaggedShard(dims, units, split_factor=split_factor)


def check_gradients_of_the_full_tensor() -> None:
    x = lay_out(numbers((4, 6)), make_mesh(), (ROWS,)).requires_grad_()
    for wrong in ([Partial(), Partial()], []):
        with pytest.raises(ValueError, match="one placement per axis"):
            x.full_tensor(grad_placements=wrong).sum().backward()


def test_placements_of_gradients_are_checked() -> None:
    run_ranks(check_gradients_of_the_full_tensor, 2)


def check_parts() -> None:
    mesh, mine = make_mesh(), 6 if dist.get_rank() == 0 else 18
    for shape in ((mine + 1,), (mine - 1,), (mine // 6, 6), (24,), (0,)):
        assert_refused(
            lambda: RaggedTensor.from_local(torch.zeros(shape), mesh, [ROWS], shape=(4, 6)),  # noqa: B023
            ValueError,
            rf"gives this rank {mine} elements of a tensor of shape \(4, 6\)",
        )


def test_parts_of_another_length() -> None:
    run_ranks(check_parts, 2)
