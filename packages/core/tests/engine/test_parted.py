"""Ranks that part after the first step: every rank says where the others are, and ends in time."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import RankMismatchError, checkpoint, clip_grad_norm_, fully_shard, unsharded
from vescale_fsdp.testing import RankError, run_ranks

LIMIT_S = 2.0
SLACK_S = 15.0  # for a busy machine, and the notes of the other ranks
SMALL, LARGE = 8, 128  # gathers and reductions as collectives, and as sends and receives

Outcome = tuple[float, str]  # seconds in what failed, and the error


def make(width: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = str(LIMIT_S)
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3)]
    model = nn.Sequential(*layers)
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, width: int, num_chunks: int = 1
) -> None:
    for _ in range(num_chunks):
        model(torch.randn(2, width)).square().sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def outcome(run: Callable[[], object]) -> Outcome:
    begun = time.monotonic()
    try:
        run()
    except RankMismatchError as error:
        return time.monotonic() - begun, str(error)
    return 0.0, ""


def a_batch_more(width: int) -> Outcome:
    model, optimizer = make(width)
    for _ in range(3):
        step(model, optimizer, width)
    if dist.get_rank() == 0:
        return outcome(lambda: step(model, optimizer, width))
    return 0.0, ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_batch_more_on_one_rank(num_ranks: int, width: int) -> None:
    (seconds, text), *_ = run_ranks(a_batch_more, num_ranks, width, timeout_s=60)
    assert LIMIT_S <= seconds < LIMIT_S + SLACK_S
    assert re.search(r"rank 0 has waited \d+\.\d s for the gather of", text)
    assert "in forward of the root of model 1 (pass 4)" in text
    assert "The last that it finished was the norm of gradients, after backward" in text
    for rank in range(1, num_ranks):
        assert f"rank {rank} waits for no collective" in text
    assert "VESCALE_FSDP_TIMEOUT_S" in text


def more_chunks(width: int) -> Outcome:
    model, optimizer = make(width)
    step(model, optimizer, width)

    def differently() -> None:
        for _ in range(3):
            step(model, optimizer, width, num_chunks=1 + dist.get_rank())

    return outcome(differently)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_another_number_of_chunks_on_each_rank(num_ranks: int, width: int) -> None:
    outcomes = run_ranks(more_chunks, num_ranks, width, timeout_s=60)
    assert all(text for _, text in outcomes)
    assert max(seconds for seconds, _ in outcomes) < LIMIT_S + SLACK_S


def raises_between_steps(width: int) -> Outcome:
    model, optimizer = make(width)
    for _ in range(2):
        step(model, optimizer, width)
    if dist.get_rank() == 1:
        return 0.0, ""
    return outcome(lambda: step(model, optimizer, width))


def test_who_waits_is_told_apart_from_who_does_not_come() -> None:
    (_, first), _, (_, third) = run_ranks(raises_between_steps, 3, LARGE, timeout_s=60)
    for text, here, other in ((first, 0, 2), (third, 2, 0)):
        assert text.startswith(f"rank {here} ")
        assert "rank 1 waits for no collective" in text
        assert f"rank {other} gave up" in text or f"rank {other} was cut off" in text


def sleeps(width: int) -> Outcome:
    model, optimizer = make(width)
    for _ in range(2):
        step(model, optimizer, width)
    if dist.get_rank() == 1:
        time.sleep(LIMIT_S + 2)
    return outcome(lambda: step(model, optimizer, width))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_a_rank_that_sleeps_for_too_long_hears_of_it(width: int) -> None:
    (_, awake), (_, asleep) = run_ranks(sleeps, 2, width, timeout_s=60)
    assert "has waited" in awake
    assert "rank 1 was cut off from another rank while it waited for the gather of" in asleep
    assert "rank 0 gave up after 2.0 s of waiting for the gather of" in asleep


def sleeps_a_little(width: int) -> None:
    model, optimizer = make(width)
    step(model, optimizer, width)
    if dist.get_rank() == 1:
        time.sleep(LIMIT_S * 0.5)  # long enough for a note
    step(model, optimizer, width)
    step(model, optimizer, width)


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_a_rank_that_is_a_little_late_does_no_harm(width: int) -> None:
    run_ranks(sleeps_a_little, 2, width, timeout_s=60)


def killed(width: int, place: str) -> None:
    model, optimizer = make(width)

    def die(*_: object) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    for index in range(4):
        if (place, index) == ("forward", 0):
            model[1].register_forward_hook(die)  # type: ignore[index]
        if (place, index) == ("third step", 2):
            die()
        y = model(torch.randn(2, width))
        if (place, index) == ("backward", 0):
            y.register_hook(die)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("place", ["forward", "backward", "third step"])
@pytest.mark.sampled(1)
def test_a_rank_that_was_killed_leaves_no_survivor(place: str, width: int) -> None:
    begun = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(killed, 2, width, place, timeout_s=60)
    died, survived = sorted(caught.value.failures, key=lambda failure: -failure.rank)
    assert died.type_name == "RankDied"
    assert survived.type_name == "RankMismatchError", survived.message
    assert "rank 1" in survived.message
    assert time.monotonic() - begun < LIMIT_S + SLACK_S + 5


# What one rank does alone

ADVICE = "evaluate on all ranks, or inside of `unsharded`; call checkpoint.save and load on all"


def both_raise(outcomes: list[Outcome], alone: str, other: str) -> None:
    """Check the errors of two ranks, of which the first did something ``alone``."""
    assert all(seconds < LIMIT_S + SLACK_S for seconds, _ in outcomes)
    (_, first), (_, second) = outcomes
    came = r"rank 1 did not come to (compare the next step|the (save|load) of a checkpoint) within"
    assert re.match(f"{came} 2 s", first), first
    assert f"Rank 0 is {alone}" in first
    assert re.search(rf"The others: rank 1 (waits for|gave up|was cut off) .*{other}", first), first
    assert re.search(rf"^rank 1 (has waited|was cut off) .*{other}", second), second
    assert re.search(rf"The others: rank 0 (waits for|gave up) .*{alone}", second), second
    assert all(ADVICE in text for _, text in outcomes)


def evaluates_alone(width: int, method: str, options: dict[str, Any]) -> Outcome:
    model, optimizer = make(width, **options)
    for _ in range(2):
        step(model, optimizer, width)

    def go_on() -> None:
        if dist.get_rank() == 0:
            with torch.inference_mode() if method == "inference" else torch.no_grad():
                model(torch.randn(2, width))
        step(model, optimizer, width)

    return outcome(go_on)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["no_grad", "inference"])
@pytest.mark.parametrize("sharding", ["zero3", "zero2", "zero1"])
@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_the_first_evaluation_on_one_rank_alone(width: int, sharding: str, method: str) -> None:
    found = run_ranks(evaluates_alone, 2, width, method, {"sharding": sharding}, timeout_s=60)
    forward = "in forward of the root of model 1"
    both_raise(found, rf"{forward} without gradients", rf"{forward} \(pass 3\)")


def evaluates_before_training() -> str:
    model, optimizer = make(SMALL)
    if dist.get_rank() == 0:
        with torch.no_grad(), pytest.raises(RankMismatchError) as caught:
            model(torch.randn(2, SMALL))
    else:
        with pytest.raises(RankMismatchError) as caught:
            step(model, optimizer, SMALL)
    assert all(param.grad is None for param in model.parameters())
    return str(caught.value)


def test_an_evaluation_before_the_first_step_on_one_rank_alone() -> None:
    for text in run_ranks(evaluates_before_training, 2, timeout_s=60):
        assert text.startswith(
            "ranks disagree about the next step: rank 0 is in forward of the root of model 1 "
            "without gradients, rank 1 in forward of the root of model 1. "
        )
        assert ADVICE in text


def evaluates_where_it_may(sharding: str) -> float:
    model, optimizer = make(SMALL, sharding=sharding)
    inputs, results = torch.randn(2, SMALL), []
    step(model, optimizer, SMALL)
    for _ in range(2):
        if dist.get_rank() == 0 and sharding == "ddp":  # nothing is to be sent
            with torch.no_grad():
                results.append(model(inputs))
        with unsharded(model):
            if dist.get_rank() == 0:
                with torch.no_grad():
                    assert sharding != "ddp" or torch.equal(model(inputs), results[-1])
        step(model, optimizer, SMALL)
    with torch.no_grad():
        return float(model(inputs).square().sum())


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero3"])
def test_one_rank_may_evaluate_alone_where_nothing_is_sent(sharding: str) -> None:
    assert len(set(run_ranks(evaluates_where_it_may, 2, sharding, timeout_s=60))) == 1


def leaves_out_the_first_backward(width: int) -> Outcome:
    model, optimizer = make(width)

    def differently() -> None:
        for number in range(2):
            loss = model(torch.randn(2, width)).square().sum()
            if number == 0 and dist.get_rank() == 1:  # as one does whose loss is not finite
                continue
            loss.backward()
            optimizer.step()

    return outcome(differently)


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_the_first_backward_on_one_rank_alone(width: int) -> None:
    found = run_ranks(leaves_out_the_first_backward, 2, width, timeout_s=60)
    both_raise(found, "in backward of model 1", r"in forward of the root of model 1 \(pass 2\)")


def saves_alone(path: Path, call: str, has_saved: bool) -> Outcome:
    model, optimizer = make(SMALL)
    step(model, optimizer, SMALL)
    if has_saved:
        checkpoint.save(path / "before", model, optimizer)

    def differently() -> None:
        if dist.get_rank() == 0:
            if call == "load":
                checkpoint.load(path / "before", model, optimizer)
            else:
                checkpoint.save(path / "alone", model, optimizer, async_=call == "async")
        step(model, optimizer, SMALL)

    return outcome(differently)


@pytest.mark.parametrize(
    ("call", "has_saved"), [("save", False), ("save", True), ("async", False), ("load", True)]
)
def test_a_checkpoint_on_one_rank_alone(call: str, has_saved: bool, tmp_path: Path) -> None:
    found = run_ranks(saves_alone, 2, tmp_path, call, has_saved, timeout_s=60)
    what = "load" if call == "load" else "save"
    both_raise(found, f"in the {what} of a checkpoint", "in forward of the root of model 1")
    assert not (tmp_path / "alone").exists()


def saves_while_the_other_evaluates(path: Path) -> str:
    model, optimizer = make(SMALL)
    step(model, optimizer, SMALL)

    def differently() -> None:
        if dist.get_rank() == 0:
            checkpoint.save(path / "alone", model, optimizer)
        else:
            with torch.no_grad():
                model(torch.randn(2, SMALL))

    _, text = outcome(differently)
    step(model, optimizer, SMALL)  # nothing was sent: the ranks go on
    checkpoint.save(path / "together", model, optimizer)
    return text


def test_ranks_that_come_to_different_places_are_told_at_once(tmp_path: Path) -> None:
    for text in run_ranks(saves_while_the_other_evaluates, 2, tmp_path, timeout_s=60):
        assert (
            "rank 0 is in the save of a checkpoint, rank 1 in forward of the root of model 1 "
            "without gradients" in text
        )


def saves_while_the_other_evaluates_on_several_axes(path: Path) -> Outcome:
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = str(LIMIT_S)
    model = nn.Sequential(nn.Linear(SMALL, SMALL), nn.Linear(SMALL, SMALL))
    fully_shard(model[0], sharding="ddp")
    fully_shard(model)

    def differently() -> None:
        if dist.get_rank() == 0:
            checkpoint.save(path / "alone", model)
        else:
            with torch.no_grad():
                model(torch.randn(2, SMALL))

    model(torch.randn(2, SMALL)).sum().backward()
    return outcome(differently)


def test_a_save_beside_an_evaluation_of_units_on_several_axes(tmp_path: Path) -> None:
    found = run_ranks(saves_while_the_other_evaluates_on_several_axes, 2, tmp_path, timeout_s=60)
    for (seconds, text), other in zip(found, (1, 0), strict=True):
        assert seconds < LIMIT_S + SLACK_S
        assert f"rank {other} did not come to compare the " in text
        assert "in the save of a checkpoint" in text
        assert "in forward of the root of model 1 without gradients" in text


def saves_beside_a_barrier(path: Path) -> str:
    model, _ = make(SMALL)
    if dist.get_rank() == 0:
        with pytest.raises(RankMismatchError) as caught:
            checkpoint.save(path / "alone", model)
        return str(caught.value)
    with pytest.raises(RuntimeError):  # gloo's: its connections are closed
        dist.barrier()
    return ""


def test_a_save_on_one_rank_alone_beside_a_barrier_ends(tmp_path: Path) -> None:
    text, _ = run_ranks(saves_beside_a_barrier, 2, tmp_path, timeout_s=60)
    assert text.startswith("rank 1 did not come to compare the next step within 2 s")
    assert "Rank 0 is in the save of a checkpoint" in text
    assert ADVICE in text
