"""Host time of each part of a step with many small parameters, compared with FSDP2.

    python -m benchmarks.host_time --blocks 250 --rounds 5

Each block has six parameters of 64 elements. Computation and communication take almost no time, so
the result is the host time of hooks, bookkeeping and dispatch. There are two ranks with
AdamW(foreach=True). Each rank has all engines, which alternate after a few steps. ``compute`` is
forward and backward of the same model without an engine, the minimum for every engine.

CPU time is that of the process with all threads, also those of the backends.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim import AdamW

from vescale_fsdp import clip_grad_norm_, fully_shard
from vescale_fsdp.optim import flatten_
from vescale_fsdp.testing import run_ranks

PARTS = ["forward", "backward", "clip", "optimizer", "zero_grad"]
Seconds = dict[str, list[float]]  # by part: mean of a round's steps, by round


class Block(nn.Module):
    """Three times a scale and a shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(3))
        self.shifts = nn.ParameterList(torch.zeros(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # [batch, width] -> the same
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            x = torch.addcmul(shift, x, scale)
        return x


class Training:
    """A model under one engine.

    Args:
        num_blocks: of six parameters each.
        width: elements of a parameter.
        shard: called on each block and on the whole; None: no engine, and no optimizer.
        clip: scales the gradients.
        flatten: whether the optimizer is flattened.
    """

    def __init__(
        self,
        num_blocks: int,
        width: int,
        shard: Callable[..., object] | None,
        clip: Callable[..., Tensor],
        *,
        flatten: bool = False,
    ) -> None:
        self._model = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        self._clip, self._steps = clip, shard is not None
        for module in (*self._model, self._model) if shard else ():
            shard(module)
        self._params = list(self._model.parameters())
        self._optimizer = AdamW(self._params, foreach=True)
        if flatten:
            flatten_(self._optimizer)
        self._x = torch.ones(1, width)

    def step(self) -> list[tuple[float, float]]:
        """Wall and CPU seconds of each part."""
        times = [_now()]
        loss = self._model(self._x).sum()
        times.append(_now())
        loss.backward()
        times.append(_now())
        if self._steps:
            self._clip(self._params, 1.0)
        times.append(_now())
        if self._steps:
            self._optimizer.step()
        times.append(_now())
        self._optimizer.zero_grad()
        times.append(_now())
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(times)]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def measure(
    engines: list[str], num_blocks: int, width: int, rounds: int, steps: int
) -> dict[str, tuple[Seconds, Seconds]]:
    """On one rank: wall and CPU seconds of each engine."""
    torch.manual_seed(0)
    made = {
        "vescale": lambda: Training(num_blocks, width, fully_shard, clip_grad_norm_),
        "vescale, flatten_": lambda: Training(
            num_blocks, width, fully_shard, clip_grad_norm_, flatten=True
        ),
        "fsdp2": lambda: Training(num_blocks, width, torch_fully_shard, nn.utils.clip_grad_norm_),
        "compute": lambda: Training(num_blocks, width, None, clip_grad_norm_),
    }
    trainings = {name: made[name]() for name in engines}
    for training in trainings.values():
        for _ in range(3):
            training.step()
    gc.collect()
    gc.freeze()  # objects of one engine must not slow the garbage collection of another
    wall: dict[str, Seconds] = {name: defaultdict(list) for name in engines}
    cpu: dict[str, Seconds] = {name: defaultdict(list) for name in engines}
    for _ in range(rounds):
        for name, training in trainings.items():
            dist.barrier()
            training.step()  # not timed: the caches have data of another engine
            taken = [training.step() for _ in range(steps)]
            for part, of_part in zip(PARTS, zip(*taken, strict=True), strict=True):
                wall[name][part].append(statistics.median(each[0] for each in of_part))
                cpu[name][part].append(statistics.mean(each[1] for each in of_part))
    return {name: (dict(wall[name]), dict(cpu[name])) for name in engines}


def _sum(seconds: Seconds) -> list[float]:
    """Of the whole step, by round."""
    return [sum(each) for each in zip(*(seconds[part] for part in PARTS), strict=True)]


def show(which: str, results: dict[str, Seconds], console: Console) -> None:
    """Print a table: medians of the rounds, and ratios to FSDP2 within a round."""
    table = Table(title=f"{which}, ms a step", title_justify="left")
    for column in ("engine", *PARTS, "step", "step / FSDP2", "less compute"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    steps = {name: _sum(seconds) for name, seconds in results.items()}
    theirs, compute = steps.get("fsdp2"), steps.get("compute")
    for name, seconds in results.items():
        row = [f"{1000 * statistics.median(seconds[part]):.1f}" for part in PARTS]
        row.append(f"{1000 * statistics.median(steps[name]):.1f}")
        if theirs and name not in ("fsdp2", "compute"):
            row.append(f"{_ratio(steps[name], theirs):.2f}")
            if compute:
                row.append(f"{_ratio(*(_less(s, compute) for s in (steps[name], theirs))):.2f}")
        table.add_row(name, *row)
    console.print(table)


def _less(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _ratio(a: list[float], b: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description="Host time with many small parameters.")
    parser.add_argument("--blocks", type=int, default=250, help="blocks of six parameters")
    parser.add_argument("--width", type=int, default=64, help="elements per parameter")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps of each engine per round")
    parser.add_argument(
        "--engines", nargs="+", default=["vescale", "vescale, flatten_", "fsdp2", "compute"]
    )
    parser.add_argument("--json", type=Path, help="file for the seconds of rank 0")
    args = parser.parse_args()
    call = (args.engines, args.blocks, args.width, args.rounds, args.steps)
    first = run_ranks(measure, args.ranks, *call, timeout_s=1200)[0]
    console = Console(width=120)
    for index, which in enumerate(("wall", "CPU")):
        show(which, {name: pair[index] for name, pair in first.items()}, console)
    if args.json:
        args.json.write_text(json.dumps(first, indent=1))


if __name__ == "__main__":
    main()
