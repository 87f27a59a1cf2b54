"""The search against all candidates, and what must hold whatever the budget is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_fsdp import PlanError
from vescale_fsdp_tune.costs import Link
from vescale_fsdp_tune.costs.model import FP32
from vescale_fsdp_tune.costs.predicting import Predictor
from vescale_fsdp_tune.costs.problem import Problem
from vescale_fsdp_tune.costs.search import _Search, candidates, divisions_of, tune
from vescale_fsdp_tune.costs.words import bucket

from .problems import MIB, division, machine, problem


def best_of_all(problem: Problem) -> tuple[int, int] | None:
    """Time (as `bucket`) and memory of the best candidate, without any search."""
    divisions = divisions_of(problem)
    predictor = Predictor(problem, divisions)
    found = [predictor.predict(each) for each in candidates(problem, divisions)]
    fitting = [each for each in found if each.fits(problem.budget_bytes)]
    return min(((bucket(each.step_s), each.peak_bytes) for each in fitting), default=None)


PROBLEMS = {
    "three blocks": problem(0, divisions=(division(3),)),
    "three blocks on gloo": problem(0, divisions=(division(3),), machine=machine("gloo")),
    "two ranks": problem(0, 2, divisions=(division(3),)),
    "tiny blocks on gloo": problem(
        0, 2, divisions=(division(4, 32, 1e-5, 1000),), machine=machine("gloo")
    ),
    "micro-batches": problem(0, divisions=(division(3),), micro_batches=4),
    "no activations": problem(0, divisions=(division(3, has_trace=False),)),
    "fp32 on gloo": problem(
        0, 2, divisions=(division(2),), machine=machine("gloo"), compute_dtype=FP32
    ),
    "offload": problem(0, divisions=(division(2),), allowed=frozenset({"offload"})),
}


AT_EACH_CHANGE = {"two ranks", "tiny blocks on gloo", "no activations", "fp32 on gloo"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in AT_EACH_CHANGE else [pytest.mark.nightly])
        for name in PROBLEMS
    ],
)
def test_the_search_finds_the_best_of_all_candidates(name: str) -> None:
    this = PROBLEMS[name]
    largest = tune(replace(this, budget_bytes=1 << 40)).chosen.peak_bytes
    for share in (0.2, 0.4, 0.6, 0.8, 0.95, 1.0):
        asked = replace(this, budget_bytes=int(share * largest))
        expected = best_of_all(asked)
        if expected is None:
            with pytest.raises(PlanError, match="nothing fits"):
                tune(asked)
            continue
        chosen = tune(asked).chosen
        assert (bucket(chosen.step_s), chosen.peak_bytes) == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_prediction_is_below_its_bounds(name: str) -> None:
    """What is pruned by them could not have been chosen."""
    search = _Search(PROBLEMS[name])
    for candidate in candidates(search._problem, search._divisions):
        bound, found = search._bound(candidate), search._predictor.predict(candidate)
        assert bound.step_s <= found.step_s * (1 + 1e-9)
        assert bound.num_bytes <= found.peak_bytes


@pytest.mark.nightly
@given(st.integers(8, 80), st.integers(1, 40), st.sampled_from(["nccl", "gloo"]))
@settings(max_examples=15, deadline=None)
def test_more_memory_is_never_slower(budget: int, more: int, backend: str) -> None:
    this = problem(budget * MIB, divisions=(division(3),), machine=machine(backend))
    try:
        chosen = tune(this).chosen
    except PlanError:
        return
    assert chosen.fits(this.budget_bytes)
    assert chosen.why == ""
    larger = tune(replace(this, budget_bytes=(budget + more) * MIB)).chosen
    assert bucket(larger.step_s) <= bucket(chosen.step_s)


def test_the_least_that_is_named_would_do() -> None:
    with pytest.raises(PlanError, match=r"the least is (\S+) MiB, in .*, with zero3") as caught:
        tune(problem(MIB))
    least = float(str(caught.value).split("the least is ")[1].split()[0])
    assert tune(problem(int((least + 0.1) * MIB))).chosen.candidate.sharding == "zero3"


def test_the_same_inputs_give_the_same_choice() -> None:
    assert tune(problem(50 * MIB)) == tune(problem(50 * MIB))


def test_with_much_memory_and_a_slow_network_nothing_is_gathered_again() -> None:
    slow = machine(inside=Link(1e9, 20e-6), between=Link(1e9, 20e-6))
    tuning = tune(problem(1 << 40, machine=slow))
    assert tuning.chosen.traffic.gather_backward_bytes == 0
    assert tuning.chosen.candidate.activations == "keep"


def test_less_memory_recomputes_only_what_it_must() -> None:
    this = problem(0, divisions=(division(6, 64, 1e-3, 16 * MIB),))
    whole = tune(replace(this, budget_bytes=1 << 40)).chosen.peak_bytes
    chosen = tune(replace(this, budget_bytes=whole - 20 * MIB)).chosen
    assert chosen.candidate.activations == "recompute"
    assert chosen.candidate.num_changed == 2  # 14 MiB each


def test_all_rows_are_in_the_table_with_reasons() -> None:
    tuning = tune(problem(50 * MIB))
    first, *others = tuning.predictions
    assert first == tuning.chosen
    rows = {each.candidate.sharding for each in tuning.predictions}
    assert rows == {"ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero1"}
    assert all(each.why.startswith(("too large by", "slower by", "as fast")) for each in others)


def test_parts_sum_to_the_whole() -> None:
    for each in tune(problem(50 * MIB)).predictions:
        assert sum(each.seconds.values()) == pytest.approx(each.step_s)
        assert sum(each.memory.values()) == each.peak_bytes


def test_only_the_possible_numbers_of_replicas_are_candidates() -> None:
    def replicas_of(possible: frozenset[int] | None) -> set[tuple[str, int]]:
        this = problem(0, 8, divisions=(division(2),), replicas=possible)
        return {(each.sharding, each.num_replicas) for each in candidates(this)}

    rows_alone = {("ddp", 1), ("zero1", 1), ("zero2", 1), ("zero3", 1)}
    assert replicas_of(frozenset({1})) == rows_alone
    assert replicas_of(frozenset({4})) == {("hsdp", 4), ("hsdp_zero1", 4)}
    assert {number for _, number in replicas_of(None)} == {1, 2, 4}
