"""Ranks that differ: another model, plan, mesh, precision or order than on the others."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from vescale_fsdp import Granularity, fully_shard

from .engines import OURS
from .harness import End, Scenario, Trial, observe, steady, write_whole

TOLD = "RankMismatchError on every rank, before the first step"
HANG_S = 6  # longer is a hang


def is_odd() -> bool:
    """The last rank is the one that differs."""
    return dist.get_rank() == dist.get_world_size() - 1


class Layers(nn.Sequential):
    """Layers, which the odd rank runs in another order if asked to."""

    turned = False

    def forward(self, x: Tensor) -> Tensor:
        layers = [*self]
        for layer in reversed(layers) if self.turned and is_odd() else layers:
            x = torch.tanh(layer(x))
        return x


def layers(count: int = 3, width: int = 8) -> Layers:
    torch.manual_seed(0)
    sizes = [8, *[width] * (count - 1), 8]
    return Layers(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


Shard = Callable[..., Any]


def sharded(model: Layers, shard: Shard, **options: Any) -> Layers:
    for layer in model:
        shard(layer, **options)
    shard(model, **options)
    return model


def another_width(shard: Shard) -> Layers:
    return sharded(layers(width=9 if is_odd() else 8), shard)


def another_depth(shard: Shard) -> Layers:
    return sharded(layers(4 if is_odd() else 3), shard)


def another_name(shard: Shard) -> Layers:
    names = ["first", "second", "other" if is_odd() else "third"]
    return sharded(Layers(OrderedDict(zip(names, layers(), strict=True))), shard)


def another_dtype(shard: Shard) -> Layers:
    return sharded(layers().bfloat16() if is_odd() else layers(), shard)


def another_frozen_layer(shard: Shard) -> Layers:
    model = layers()
    model[1].requires_grad_(not is_odd())
    return sharded(model, shard)


def other_units(shard: Shard) -> Layers:
    model = layers()
    if not is_odd():
        shard(model[1])
    shard(model)
    return model


def another_granularity(shard: Shard) -> Layers:
    rows = Granularity.rows(3 if is_odd() else 1)
    return sharded(layers(), shard, granularity=rows)


def another_mesh(shard: Shard) -> Layers:
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return sharded(layers(), shard, mesh=square if is_odd() else flat)


def another_precision(shard: Shard) -> Layers:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if is_odd() else None)
    return sharded(layers(), shard, mp_policy=policy)


def another_reduction(shard: Shard) -> Layers:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if is_odd() else torch.float32)
    return sharded(layers(), shard, mp_policy=policy)


def another_order(shard: Shard) -> Layers:
    model = sharded(layers(), shard)
    model.turned = True
    return model


DIFFERENCES: dict[str, Callable[[Shard], Layers]] = {
    "width of a layer": another_width,
    "number of layers": another_depth,
    "name of a layer": another_name,
    "dtype": another_dtype,
    "frozen layer": another_frozen_layer,
    "units": other_units,
    "granularity": another_granularity,
    "mesh": another_mesh,
    "precision": another_precision,
    "precision of the reduction": another_reduction,
    "order of modules": another_order,
}


def first_step(engine: str, name: str, folder: Path) -> float:
    """Build a model that differs on one rank, and train it for a step. The sum of its weights."""
    model = DIFFERENCES[name](fully_shard if engine == OURS else fsdp2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    rank = dist.get_rank()
    write_whole(folder / f"{rank}.start", repr(time.monotonic()).encode())
    model(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).sum().backward()
    write_whole(folder / f"{rank}.step", b"")
    optimizer.step()
    return time.monotonic()


def different_ranks(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    """On two ranks, and in the second round on four."""
    names = [name for name in DIFFERENCES if engine == OURS or name != "granularity"]
    for number in range(num_trials * len(names)):
        name = names[number % len(names)]
        yield one_trial(engine, name, 4 if number >= len(names) or name == "mesh" else 2, folder)


def one_trial(engine: str, name: str, size: int, folder: Path) -> Trial:
    def trial(place: Path) -> Trial:
        ends = observe(first_step, size, engine, name, place, timeout_s=HANG_S)
        starts = [float(file.read_bytes()) for file in place.glob("*.start")]
        return judged(f"{name}, {size} ranks", ends, starts, any(place.glob("*.step")))

    return steady(trial, folder / "trial")


def judged(name: str, ends: list[End], starts: list[float], has_stepped: bool) -> Trial:
    start = max(starts, default=0.0)
    hows = {end.how for end in ends}
    told = all(end.kind == "RankMismatchError" for end in ends)
    if told and not has_stepped:
        outcome = TOLD
    elif told:
        outcome = "RankMismatchError on every rank, after a step"
    elif "died" in hows:
        outcome = "SIGABRT" if any(end.kind == "-6" for end in ends) else "a rank died"
    elif "hung" in hows:
        outcome = f"hangs for {HANG_S} s or more"
    elif hows == {"returned"}:
        outcome = "no error"
    else:
        outcome = "another error, or on some ranks only"
    raised = [end.at - start for end in ends if end.how == "raised"]
    text = "; ".join(f"rank {e.rank} {e.how} {e.kind} {e.message[:150]}" for e in ends)
    return Trial(
        outcome,
        f"all ranks came to the first step: {name}" if len(starts) == len(ends) else "",
        seconds=max(raised, default=None),
        detail=f"{name}: {text}",
    )


SCENARIOS = [
    Scenario(
        "ranks that differ",
        "another model, plan, mesh, precision or order on one rank",
        different_ranks,
        frozenset({TOLD}),
        short=1,
        full=2,
    ),
]
