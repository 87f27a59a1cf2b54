"""Figures of all ranks, merged through the store."""

from __future__ import annotations

import torch.distributed as dist

from vescale_fsdp.errors import PlanError
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_tune.budget.merging import Figures, merge_figures, result_of


def merged() -> Figures:
    rank = dist.get_rank()
    own = Figures([rank, 7.0], [rank, -rank, 10**30 + rank])
    return merge_figures("figures", [0, 1, 2], lambda: own)


def test_the_smallest_and_the_largest() -> None:
    found = run_ranks(merged, 3)
    assert found == [Figures([0, 7.0], [2, 0, 10**30 + 2])] * 3


def failing(kind: type[Exception]) -> list[str]:
    def fail() -> Figures:
        if dist.get_rank() == 1:
            raise kind("no shape")
        return Figures([1.0], [1.0])

    texts = []
    for attempt in (
        lambda: merge_figures("figures", [0, 1], fail),
        lambda: result_of("result", [0, 1], 1, fail),
    ):
        try:
            attempt()
        except (PlanError, KeyError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_a_failure_is_raised_on_all_ranks() -> None:
    plan = "PlanError: no shape"
    assert run_ranks(failing, 2, PlanError) == [["PlanError: rank 1: no shape", plan], [plan, plan]]
    told = "PlanError: KeyError: 'no shape'"
    assert run_ranks(failing, 2, KeyError) == [
        ["PlanError: rank 1: KeyError: 'no shape'", told],
        ["KeyError: 'no shape'", told],
    ]


def told() -> tuple[int, str]:
    return result_of("result", [0, 1], 1, lambda: (dist.get_rank(), "é\n"))


def test_one_rank_tells_the_others() -> None:
    assert run_ranks(told, 2) == [(1, "é\n")] * 2
