"""NaN and infinity on one rank: what the policy says, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import NonFiniteError, check_gradients

from .engines import OURS, local_digest, make, train
from .harness import Scenario, Trial, observe

POLICY = "as the policy says, on all ranks"
TAKEN, SOME = "all weights are NaN on all ranks", "some weights are NaN"
PLACES, VALUES = ("input", "gradient", "weight"), (math.nan, math.inf)
POLICIES = ("raise", "skip", "ignore")


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def backward(model: nn.Module, place: str, value: float, step: int) -> None:
    """A backward of a batch, with the value somewhere on rank 1."""
    torch.manual_seed(10 * step + dist.get_rank())
    x = torch.randn(4, 32)
    held = next(p for p in reversed(list(model.parameters())) if local(p).numel())
    with torch.no_grad():
        if place == "weight" and dist.get_rank() == 1:
            local(held).view(-1)[-1] = value
        if place == "input" and dist.get_rank() == 1:
            x[0, 0] = value
    model(x).square().sum().backward()
    if place == "gradient" and dist.get_rank() == 1:
        assert held.grad is not None, "the backward made it"
        local(held.grad).view(-1)[-1] = value


def with_policy(place: str, value: float, policy: str) -> tuple[str, str]:
    """The outcome and the evidence on this rank."""
    model, optimizer = make(OURS, width=101)
    twin, twin_optimizer = make(OURS, width=101)  # the same without the check
    for each in ((model, optimizer), (twin, twin_optimizer)):
        train(*each, 1)
    for each in (model, twin):
        backward(each, place, value, 2)
    bad = sum(not local(p.grad).isfinite().all() for p in model.parameters() if p.grad is not None)
    before = local_digest(model, optimizer)
    verdict: Any
    try:
        verdict = check_gradients(model, policy)  # type: ignore[arg-type]
    except NonFiniteError:
        verdict = "raised"
    unchanged = local_digest(model, optimizer) == before
    if verdict is True:
        optimizer.step()
        twin_optimizer.step()
        is_right = policy == "ignore" and local_digest(model, optimizer) == local_digest(
            twin, twin_optimizer
        )
    elif policy == "raise":
        is_right = verdict == "raised" and unchanged
    else:  # the next step is as if the bad one had not been there
        is_right = verdict is False and unchanged
        if place != "weight":
            for each in (model, twin):
                each.zero_grad()
                backward(each, "", 0.0, 3)
            optimizer.step()
            twin_optimizer.step()
            is_right &= local_digest(model, optimizer) == local_digest(twin, twin_optimizer)
    return POLICY if is_right else f"{verdict}, unchanged: {unchanged}", f"{bad} gradients"


def clip_and_step(engine: str, place: str, value: float) -> tuple[str, str]:
    """What a loop without a check does."""
    model, optimizer = make(engine, width=101)
    backward(model, place, value, 1)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    shards = [local(p) for p in model.parameters() if local(p).numel()]
    counts = torch.tensor([sum(not each.isfinite().all() for each in shards), len(shards)])
    dist.all_reduce(counts)
    num_bad, num_held = counts.tolist()
    return TAKEN if num_bad == num_held else SOME, f"{num_bad} of {num_held} shards"


def combinations(engine: str, cases: list[tuple[str, float, str]]) -> list[tuple[str, str]]:
    if engine == OURS:
        return [with_policy(*case) for case in cases]
    return [clip_and_step(engine, place, value) for place, value, _ in cases]


def not_finite(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    cases = list(product(PLACES, VALUES, POLICIES if engine == OURS else ("none",)))
    ends = observe(combinations, 2, engine, cases)
    bad = [end for end in ends if end.how != "returned"]
    if bad:
        yield Trial("error", "it raised", detail=f"{bad[0].kind}: {bad[0].message}")
        return
    for case, *found in zip(cases, *(end.value for end in ends), strict=True):
        place, value, policy = case
        name = f"{value} in a rank's {place}, {policy}"
        outcome = next((each for each, _ in found if each != POLICY), POLICY)
        fired = [seen for _, seen in found if seen[0] != "0"]
        evidence = f"not finite: {', '.join(fired)}" if fired else ""
        yield Trial(outcome, evidence, detail=name)


SCENARIOS = [
    Scenario(
        "numbers",
        "NaN or infinity in an input, a gradient or a weight of one rank",
        not_finite,
        frozenset({POLICY}),
        0,
        0,
    ),
]
