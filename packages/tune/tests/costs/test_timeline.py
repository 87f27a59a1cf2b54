"""The table in the docstring of ``timeline``, moment by moment, and its corner cases."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from vescale_fsdp.dbuffer import transport
from vescale_fsdp_tune.costs import account, timeline
from vescale_fsdp_tune.costs.machine import Backend
from vescale_fsdp_tune.costs.model import BF16, FP32
from vescale_fsdp_tune.costs.timeline import run_step
from vescale_fsdp_tune.costs.units import GroupCosts, How, UnitCosts

NUM_SHARDS = 10


def unit(
    elements: int, *, root: bool = False, keeps: bool | None = None, trainable: bool = True
) -> UnitCosts:
    """One group; with 10 shards, F = M = G = R = 20 x elements bytes and g = 4 x elements."""
    group = GroupCosts(elements, NUM_SHARDS, (elements * NUM_SHARDS,), FP32, BF16, FP32, trainable)
    groups = (group,) if elements else ()
    name = "r" if root else "b"
    return UnitCosts(name, groups, root, root if keeps is None else keeps)


def peak(*units: UnitCosts, backend: Backend = "gloo", in_flight: int = 2) -> int:
    return run_step(units, How(backend, in_flight=in_flight)).peak.num_bytes


def test_peak_of_many_blocks_is_two_gathered_and_three_times_the_gradients() -> None:
    blocks = [unit(1)] * 12
    # In the eleventh block of the backward: F_r M_r, 2 F, G and R of the block before, M and nine
    # reduced gradients. In the last one F is one less.
    assert peak(unit(1, root=True), *blocks) == 20 * (2 + 2 + 2 + 1) + 4 * 9


def test_gathers_and_reductions_take_turns_in_a_block() -> None:
    group = GroupCosts(1, NUM_SHARDS, (2, 3, 1, 4), FP32, BF16, FP32, trainable=True)
    blocks = [UnitCosts("b", (group,), is_root=False, keeps=False)] * 12
    # The tensors of 4 and 1 are the first half of the gradients: F, G, R, they, and 4 bytes for
    # each reduced gradient and the sum. Later there are two F and M, which is less. In the last
    # block, where nothing is left to gather, F, G, R and M; ten gradients have been reduced.
    assert peak(unit(0, root=True), *blocks) == 20 * 4 + 4 * 10
    # With room for two, one of each is under way: with half of the gradients 2 F, G, R and them.
    more = peak(unit(0, root=True), *blocks, in_flight=3)
    assert more > 20 * 4 + 2 * 5


def test_a_message_of_small_units_is_there_until_the_last_has_its_part() -> None:
    def peak_of(trainable: bool) -> account.Peak:
        units = [unit(0, root=True), *[unit(1, trainable=trainable)] * 12]
        return run_step(units, How("gloo", small_bytes=1 << 13)).peak

    # In the forward of the eleventh unit: the message, its parameters and those of the last one.
    assert peak_of(trainable=False).num_bytes == 20 * (12 + 2)
    # In backward the message of all reductions is a copy of the gradients, beside what arrives. It
    # is sent when the first unit has ended: no parameters are there any more.
    assert peak_of(trainable=True).parts == {
        account.LOCAL: 2 * 20 * 12,
        account.REDUCING: 20 * 12,
    }


def test_peak_of_a_large_root_is_at_the_end() -> None:
    blocks = [unit(1)] * 4
    step = run_step([unit(100, root=True), *blocks], How("gloo"))
    # G_r R_r and the root's sum; the four blocks have left their reduced gradients.
    assert step.peak.num_bytes == 2 * 2000 + 400 + 4 * 4
    assert step.peak.when == "the end of the backward"


def test_on_nccl_gradients_are_collected_in_the_reduce_dtype() -> None:
    blocks = [unit(1)] * 12
    # F_r M_r, 2 F and M; G of 40 bytes is under way; ten reduced gradients, of which the last is
    # there from the start of its reduction.
    assert peak(unit(1, root=True), *blocks, backend="nccl") == 20 * 5 + 40 + 4 * 10


def test_nccl_reduces_in_place_where_no_cast_is_needed() -> None:
    group = GroupCosts(1, NUM_SHARDS, (NUM_SHARDS,), BF16, BF16, BF16, trainable=True)
    blocks = [UnitCosts("b", (group,), is_root=False, keeps=False)] * 12
    assert peak(unit(0, root=True), *blocks, backend="nccl") == 20 * 4 + 2 * 10


def test_one_in_flight_gathers_nothing_ahead_and_waits_for_each_reduction() -> None:
    blocks = [unit(1)] * 12
    # When the last reduction (G and R) lands; twelve reduced gradients.
    assert peak(unit(0, root=True), *blocks, in_flight=1) == 20 * 2 + 4 * 12


def test_without_training_there_are_two_gathered_blocks() -> None:
    blocks = [unit(1, trainable=False)] * 4
    step = run_step([unit(3, root=True, trainable=False), *blocks], How("gloo"))
    assert step.peak.num_bytes == 20 * (3 + 2)
    assert step.backward_gathers == []


def test_each_unit_is_gathered_once_in_forward_and_released_ones_again_in_backward() -> None:
    step = run_step([unit(1, root=True), unit(1), unit(1, keeps=True), unit(1)], How("gloo"))
    assert step.forward_gathers == [0, 1, 2, 3]
    assert step.backward_gathers == [3, 1]


@pytest.mark.parametrize(("in_flight", "again"), [(2, [3, 2, 1]), (3, [2, 1]), (4, [1]), (6, [])])
def test_with_more_in_flight_the_last_units_stay_for_the_backward(
    in_flight: int, again: list[int]
) -> None:
    step = run_step([unit(1, root=True), *[unit(1)] * 3], How("gloo", in_flight=in_flight))
    assert (step.forward_gathers, step.backward_gathers) == ([0, 1, 2, 3], again)


def test_a_root_that_is_released_is_gathered_again() -> None:
    step = run_step([unit(1, root=True, keeps=False), unit(1)], How("gloo"))
    assert step.backward_gathers == [0, 1]


def test_backward_ends_at_the_first_trained_block() -> None:
    frozen, trained = unit(1, trainable=False), unit(1)
    root = unit(1, root=True, trainable=False)
    step = run_step([root, frozen, frozen, frozen, trained, trained], How("gloo"))
    assert step.backward_gathers == [5, 4]


def test_parts_of_the_peak_sum_to_it() -> None:
    found = run_step([unit(7, root=True), unit(2), unit(5)], How("nccl")).peak
    assert sum(found.parts.values()) == found.num_bytes


def lines_run(units: list[UnitCosts]) -> int:
    """How many lines of Python a step of these units takes."""
    number = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal number
        number += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        run_step(units, How("nccl"))
    finally:
        sys.settrace(before)
    return number


@pytest.mark.parametrize("keeps", [True, False])
def test_twice_the_units_are_twice_the_work(keeps: bool) -> None:
    """To look through all that follow a unit is four times the work; models have 100,000."""
    few, many = (
        lines_run([unit(1, root=True), *[unit(1, keeps=keeps)] * number]) for number in (400, 800)
    )
    assert many < 2.1 * few


def test_many_units_are_gathered_in_order() -> None:
    step = run_step([unit(1, root=True), *[unit(1)] * 1000], How("nccl"))
    assert step.backward_gathers == list(range(1000, 0, -1))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_one_rank_needs_no_scratch(backend: Backend) -> None:
    group = GroupCosts(10, 1, (10,), FP32, BF16, FP32, trainable=True)
    root = UnitCosts("r", (group,), is_root=True, keeps=True)
    # gloo: G and the sum. An accelerator collects in the dtype of the sum: M and that.
    assert peak(root, backend=backend) == 20 + 40


def test_long_exchanges_need_no_scratch_for_the_own_part() -> None:
    assert timeline.SHORTEST_EXCHANGE == transport.SHORTEST_BYTES


def test_messages_and_parameters_are_there_together_while_they_are_decoded() -> None:
    # Frozen, of 100 elements of bf16 over 10 ranks that send 7 bytes each.
    group = GroupCosts(10, NUM_SHARDS, (100,), FP32, BF16, FP32, False, gather_message=7)
    block = UnitCosts("b", (group,), is_root=False, keeps=False)
    step = run_step([unit(0, root=True), block], How("gloo"))
    assert step.peak.num_bytes == 200 + 70 + 7  # the last ones stay, to be sent again
    assert step.peak.parts == {account.GATHERED: 270, account.KEPT: 7}
