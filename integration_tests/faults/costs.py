"""What all of it costs: saves and loads beside those of DCP, in turns, and a step."""

from __future__ import annotations

import functools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

from vescale_fsdp import checkpoint, compat, fully_shard
from vescale_fsdp.testing.ranks import close_pools

from .engines import OURS, STOCK, load, make, save, train
from .harness import Scenario, Trial, observe

# Layers and width of models with 17 million parameters: 200 MB with the states of AdamW.
MANY, FEW = (16, 512), (1, 2048)
MOST_OF_SAVE, MOST_OF_LOAD = 1.25, 1.5
WITHIN, ABOVE = "within", "above"


def timed(work: Callable[[], Any]) -> float:
    """Milliseconds until the last rank is done."""
    dist.barrier()
    start = time.monotonic()
    work()
    dist.barrier()
    return 1000 * (time.monotonic() - start)


def make_large(engine: str, layers: int, width: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """Blocks of two matrices, each a unit, trained for a step."""
    shard = fully_shard if engine == OURS else fsdp2
    model = nn.Sequential()
    for _ in range(layers):
        block = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
        model.append(shard(block))
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def times(root: Path, rounds: int, size: tuple[int, int]) -> dict[str, list[float]]:
    """Of saves and loads with both, in turns; the first round is not counted."""
    jobs = {engine: make_large(engine, *size) for engine in (OURS, STOCK)}
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for engine, (model, optimizer) in jobs.items():
            folder = root / f"{engine}-{number}"
            path = folder / ("step-1" if engine == OURS else "checkpoint")
            a = timed(functools.partial(save, engine, folder, 1, model, optimizer))
            b = timed(functools.partial(load, engine, path, model, optimizer))
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
            if number:
                found.setdefault(f"save {engine}", []).append(a)
                found.setdefault(f"load {engine}", []).append(b)
    return found


def beside_dcp(
    size: tuple[int, int], engine: str, num_trials: int, folder: Path
) -> Iterator[Trial]:
    """The ratio is the median of those of the rounds: what else runs disturbs both alike.

    In new processes: memory that earlier work has left behind is for tensors of some sizes only.
    """
    close_pools()
    end, _ = observe(times, 2, folder, num_trials, size, timeout_s=60 + 15 * num_trials)
    assert end.how == "returned", end
    for what, most in (("save", MOST_OF_SAVE), ("load", MOST_OF_LOAD)):
        ours, stock = end.value[f"{what} {OURS}"], end.value[f"{what} {STOCK}"]
        ratio = statistics.median(a / b for a, b in zip(ours, stock, strict=True))
        medians = f"{statistics.median(ours):,.0f} and {statistics.median(stock):,.0f} ms"
        text = (
            f"{what}: {ratio:.2f} times DCP's (at most {most}); median {medians}, "
            f"least {min(ours):,.0f} and {min(stock):,.0f} ms, of {len(ours)}"
        )
        yield Trial(f"{what} {WITHIN if ratio <= most else ABOVE}", text, detail=text)


def hooks_of(model: nn.Module, optimizer: Any) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    found = sum(len(getattr(m, name)) for m in model.modules() for name in names)
    return found + sum(
        len(getattr(optimizer, f"_optimizer_{name}_hooks")) for name in ("step_pre", "step_post")
    )


def step_after_saves(root: Path) -> tuple[int, int]:
    """How many hooks a save and a load have left, and how often later steps use the store."""
    model, optimizer = make(OURS, width=101)
    for step in range(3):
        train(model, optimizer, step)
    before = hooks_of(model, optimizer)
    checkpoint.save(root / "step-1", model, optimizer)
    checkpoint.load(root / "step-1", model, optimizer)
    left, calls, original = hooks_of(model, optimizer) - before, [], compat.default_store
    compat.default_store = lambda: calls.append(1) or original()  # type: ignore[func-returns-value]
    try:
        for step in range(3, 6):
            train(model, optimizer, step)
    finally:
        compat.default_store = original
    torch.manual_seed(0)
    return left, len(calls)


def per_step(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    for end in observe(step_after_saves, 2, folder):
        assert end.how == "returned", end
        left, num_calls = end.value
        text = f"{left} hooks left, {num_calls} uses of the store in three steps"
        yield Trial("nothing" if (left, num_calls) == (0, 0) else "something", text, detail=text)


GROUP = "cost"
SCENARIOS = [
    Scenario(
        GROUP,
        "save and load of 200 MB in 64 tensors, alternating with DCP",
        functools.partial(beside_dcp, MANY),
        frozenset({f"save {WITHIN}", f"load {WITHIN}"}),
        short=None,  # a measured time; what else runs in CI decides it
        full=15,
        engines=(OURS,),
    ),
    Scenario(
        GROUP,
        "the same in 4 tensors",
        functools.partial(beside_dcp, FEW),
        frozenset({f"save {WITHIN}", f"load {WITHIN}"}),
        short=None,
        full=15,
        engines=(OURS,),
    ),
    Scenario(GROUP, "per step", per_step, frozenset({"nothing"}), 1, 1, engines=(OURS,)),
]
