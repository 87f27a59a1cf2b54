"""An exception in the user's code on one rank, which catches it and goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .engines import OURS, digest, make
from .harness import Scenario, Trial, observe, steady

WORKS = "the next steps work"
CLEAR = "a clear error on every rank"
TOLD = "a clear error on that rank, gloo's on the others when it has ended"
WRONG = "silently wrong weights"
HANG_S, LIMIT_S = 20, 4
PLACES = ("before forward", "between units", "in backward", "after backward")
NUM_STEPS, BAD_STEP, ODD_RANK = 5, 2, 1


class Oops(Exception):
    """The user's."""


class Breaks(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Oops


def loop(engine: str, place: str, resets: bool, checks: bool) -> tuple[int, str]:
    """Train; how many exceptions this rank has caught, and the digest at the end."""
    os.environ["VESCALE_FSDP_CHECK_ORDER"] = str(int(checks))
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = str(LIMIT_S)
    model, optimizer = make(engine, width=101)
    odd = dist.get_rank() == ODD_RANK
    num_caught = 0
    for step in range(NUM_STEPS):
        try:
            one_step(model, optimizer, step, place if odd and step == BAD_STEP else "")
        except Oops:
            num_caught += 1
            optimizer.zero_grad()
            if resets:
                model.reset_iter_state()
            if place == PLACES[0]:  # a batch that cannot be read: take another
                one_step(model, optimizer, step, "")
    return num_caught, digest(model, optimizer)


def one_step(model: nn.Module, optimizer: Any, step: int, place: str) -> None:
    torch.manual_seed(step)
    x = torch.randn(4, 32)
    if place == "before forward":
        raise Oops

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if place == "between units":
            raise Oops
        return Breaks.apply(out) if place == "in backward" else out

    handle = model.layers[1].register_forward_hook(hook)
    try:
        model(x).square().sum().backward()
    finally:
        handle.remove()
    if place == "after backward":
        raise Oops
    optimizer.step()
    optimizer.zero_grad()


def caught(engine: str, places: tuple[str, ...], checks: bool, folder: Path) -> Iterator[Trial]:
    """With and without ``reset_iter_state``; ``checks``: the order of all steps is compared."""
    for place, resets in product(places, (False, True)):

        def trial(_: Path, place: str = place, resets: bool = resets) -> Trial:
            ends = observe(loop, 2, engine, place, resets, checks, timeout_s=HANG_S)
            name = f"{place}{', reset_iter_state' if resets else ''}"
            text = "; ".join(f"rank {e.rank} {e.how} {e.kind} {e.message[:300]}" for e in ends)
            hows = {end.how for end in ends}
            if "hung" in hows:
                outcome = f"hangs for {HANG_S} s or more"
            elif "died" in hows:
                outcome = "a rank died"
            elif hows == {"returned"}:
                same = len({end.value[1] for end in ends}) == 1
                outcome = WORKS if same else WRONG
            elif all(end.how == "raised" for end in ends):
                told = [end.is_ours for end in ends]
                outcome = CLEAR if all(told) else TOLD if told[ODD_RANK] else "gloo's errors"
            else:
                outcome = "an error on one rank only"
            return Trial(outcome, f"raised {name}", detail=f"{name}: {text}")

        yield steady(trial, folder / "trial")


def in_a_pass(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    places = ("between units", "in backward")
    return caught(engine, places if num_trials else places[:1], False, folder)


def in_a_checked_pass(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    return caught(engine, ("between units", "in backward"), True, folder)


def before_a_pass(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    return caught(engine, ("before forward",), False, folder)


def before_the_optimizer(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    return caught(engine, ("after backward",), False, folder)


GROUP = "an exception on one rank, which catches it"
GOOD = frozenset({WORKS, CLEAR, TOLD})
SCENARIOS = [
    Scenario(
        GROUP, "before the forward; it continues with another batch", before_a_pass, GOOD, 0, 0
    ),
    Scenario(
        GROUP,
        "in forward or backward; it continues with the next step",
        in_a_pass,
        GOOD,
        short=0,
        full=1,
    ),
    Scenario(
        GROUP,
        "the same, with VESCALE_FSDP_CHECK_ORDER=1",
        in_a_checked_pass,
        GOOD,
        None,
        0,
        engines=(OURS,),
    ),
    Scenario(
        GROUP,
        "between backward and the optimizer's step; it skips that step",
        before_the_optimizer,
        GOOD,
        0,
        0,
        missed="a step that only one rank skips is not detected; use "
        'check_gradients(model, "skip"), which decides for all ranks',
    ),
]
