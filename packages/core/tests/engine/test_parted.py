"""Ranks that part after the first step: every rank says where the others are, and ends in time."""

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import RankMismatchError, clip_grad_norm_, fully_shard
from vescale_fsdp.testing import RankError, run_ranks

LIMIT_S = 2.0
SLACK_S = 15.0  # for a busy machine, and the notes of the other ranks
SMALL, LARGE = 8, 128  # gathers and reductions as collectives, and as sends and receives

Outcome = tuple[float, str]  # seconds in what failed, and the error


def make(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = str(LIMIT_S)
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3)]
    model = nn.Sequential(*layers)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
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
