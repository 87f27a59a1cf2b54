"""Saved by 1 to 4 ranks, loaded by 1 to 4; and resumed: all of it bit for bit."""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from vescale_fsdp import Granularity, checkpoint

from .engines import (
    OURS,
    digest,
    load,
    local_digest,
    make,
    newest,
    save,
    state_of,
    stock_state,
    train,
)
from .harness import Scenario, Trial, observe

BITWISE, DIFFERS = "bitwise", "differs"


# Other numbers of ranks


def random_cuts(seed: int) -> Granularity:
    chance = random.Random(seed)
    return chance.choice(
        [
            Granularity.elements(chance.randint(1, 99)),
            Granularity.rows(chance.randint(1, 9)),
            Granularity.whole(),
        ]
    )


def draws() -> tuple[float, list[float]]:
    return random.random(), torch.rand(3).tolist()


def shard_sizes(model: Any, optimizer: Any) -> list[int]:
    """Of this rank: it shows that the cuts are others."""
    return [
        each.to_local().numel()
        for each in state_of(model, optimizer).values()
        if hasattr(each, "to_local")
    ]


def save_once(engine: str, root: Path) -> tuple[str, list[int], Any]:
    size, rank = dist.get_world_size(), dist.get_rank()
    model, optimizer = make(engine, width=101, granularity=random_cuts(size))
    for step in range(1, size + 1):
        train(model, optimizer, step)
    random.seed(rank)
    torch.manual_seed(rank)
    save(engine, root / str(size), size, model, optimizer)
    drawn = draws()
    return digest(model, optimizer), shard_sizes(model, optimizer), drawn


def load_each(engine: str, root: Path, by: list[int]) -> dict[int, tuple[int, str, list[int], Any]]:
    found = {}
    for size in by:
        cuts = random_cuts(10 * dist.get_world_size() + size)
        model, optimizer = make(engine, width=101, seed=9, granularity=cuts)
        step = load(engine, newest(engine, root / str(size)), model, optimizer)
        drawn = draws()
        found[size] = step, digest(model, optimizer), shard_sizes(model, optimizer), drawn
    return found


def other_sizes(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    pairs = list(product((1, 2, 3, 4), repeat=2))
    by_size = defaultdict(list)
    for saved_by, loaded_by in pairs if num_trials == len(pairs) else [(1, 3), (3, 2)]:
        by_size[loaded_by].append(saved_by)
    if num_trials not in (2, len(pairs)):
        raise ValueError(f"there are 2 or {len(pairs)} trials, not {num_trials}")
    saved = {}
    for size in sorted({size for each in by_size.values() for size in each}):
        ends = observe(save_once, size, engine, folder)
        assert all(end.how == "returned" for end in ends), ends
        saved[size] = [end.value for end in ends]
    for size, by in sorted(by_size.items()):
        ends = observe(load_each, size, engine, folder, by)
        for saved_by in by:
            yield compared(engine, saved_by, size, saved[saved_by], ends)


def compared(engine: str, by: int, size: int, saved: list[Any], ends: list[Any]) -> Trial:
    name = f"saved by {by}, loaded by {size}"
    bad = [end for end in ends if end.how != "returned"]
    if bad:
        return Trial("error", name, detail=f"{name}: {bad[0].kind}: {bad[0].message[-300:]}")
    found = [end.value[by] for end in ends]
    same = all((step, each) == (by, saved[0][0]) for step, each, _, _ in found)
    if engine == OURS:  # the generators of the ranks that were there
        same &= all(a[3] == b[2] for a, b in zip(found, saved, strict=False))
    cuts_differ = [each[2] for each in found] != [each[1] for each in saved]
    evidence = f"{name}, with other cuts" if cuts_differ or (by, size) == (1, 1) else ""
    if engine != OURS:
        evidence = name
    return Trial(BITWISE if same else DIFFERS, evidence, detail=name)


# Resuming

NUM_STEPS = 6


def steps(model: Any, optimizer: Any, count: int) -> list[float]:
    """Training on this rank's own random batches, with dropout."""
    losses = []
    for _ in range(count):
        loss = model(torch.randn(4, 32) * (1 + random.random())).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def undisturbed(engine: str) -> tuple[list[float], str, Any]:
    model, optimizer = make(engine)
    seed_ranks()
    losses = steps(model, optimizer, NUM_STEPS)
    return losses, local_digest(model, optimizer), draws()


def seed_ranks() -> None:
    random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())


def saving(engine: str, root: Path, at: int, background: bool) -> tuple[list[float], str, Any]:
    """The same with a save after some steps, during the steps that follow if in the background."""
    model, optimizer = make(engine)
    seed_ranks()
    losses = steps(model, optimizer, at)
    if engine == OURS:
        handle = checkpoint.save(root, model, optimizer, extra={"step": at}, async_=background)
        losses += steps(model, optimizer, NUM_STEPS - at)
        handle.wait()
        return losses, local_digest(model, optimizer), draws()
    state = stock_state(model, optimizer) | {"step": at, **rng_of_ranks()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if background:
            group = dist.new_group(backend="gloo")
            future = dcp.async_save(state, checkpoint_id=root, process_group=group)
            losses += steps(model, optimizer, NUM_STEPS - at)
            future.result()
        else:
            dcp.save(state, checkpoint_id=root)
            losses += steps(model, optimizer, NUM_STEPS - at)
    return losses, local_digest(model, optimizer), draws()


def rng_of_ranks() -> dict[str, Any]:
    """What a user of DCP adds, for it saves no generators."""
    own = f"rng-{dist.get_rank()}"
    return {own: torch.get_rng_state(), f"{own}-python": random.getstate()}


def resumed(engine: str, root: Path) -> tuple[list[float], str, Any]:
    model, optimizer = make(engine, seed=5)
    if engine == OURS:
        at = int(checkpoint.load(root, model, optimizer)["step"])
    else:
        state = {**rng_of_ranks()}
        dcp.load(state, checkpoint_id=root)
        at = load(engine, root, model, optimizer)
        torch.set_rng_state(state[f"rng-{dist.get_rank()}"])
        random.setstate(state[f"rng-{dist.get_rank()}-python"])
    losses = steps(model, optimizer, NUM_STEPS - at)
    return losses, local_digest(model, optimizer), draws()


def resume(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    plain = [end.value for end in observe(undisturbed, 2, engine)]
    for number in range(num_trials):
        background, at = number % 2 == 1, 1 + number // 2 % (NUM_STEPS - 1)
        root, how = folder / f"{number}", "in the background" if background else "waiting"
        name = f"saved {how} after step {at} of {NUM_STEPS}"
        first = observe(saving, 2, engine, root, at, background)
        second = observe(resumed, 2, engine, root)
        bad = [end for end in [*first, *second] if end.how != "returned"]
        if bad:
            yield Trial("error", name, detail=f"{name}: {bad[0].kind}: {bad[0].message[-300:]}")
            continue
        same = [end.value for end in first] == plain
        same &= [end.value[1:] for end in second] == [each[1:] for each in plain]
        same &= [end.value[0] for end in second] == [each[0][at:] for each in plain]
        yield Trial(BITWISE if same else DIFFERS, name, detail=name)


GROUP = "other numbers of ranks, resuming"
SCENARIOS = [
    Scenario(
        GROUP,
        "saved by 1 to 4 ranks, loaded by 1 to 4, with random shards",
        other_sizes,
        frozenset({BITWISE}),
        2,
        16,
    ),
    Scenario(
        GROUP,
        "resumed on as many ranks, saved waiting and in the background",
        resume,
        frozenset({BITWISE}),
        2,
        10,
    ),
]
