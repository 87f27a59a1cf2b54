"""Bytes and time of copies between parameters, gradients and collectives in a step (Table 1).

    python -m benchmarks.copies                            # 4 minutes on two cores
    python -m benchmarks.copies --models gpt-7m --rounds 2

Real ranks over gloo, one thread each. The engines alternate, and a profiler records the operators
of one step. FSDP2's copies have separate operators:

    all_gather_copy_in      a rank's shards to the all-gather's input
    split_with_sizes_copy   the all-gather's output to parameters (copy-out)
    chunk_cat               gradients to the reduce-scatter's input (copy-in)

Our engine has none of these, because parameters are views of the all-gather's output. ``rest`` are
all other copies of the step, without those that the model makes without an engine. For our engine
these are copies of gradients to the reduce-scatter's input. Copies within a process group are not
counted. Times are wall times of the operators on rank 0, by the profiler.

The paper measures GPT-OSS-120B under FSDP2 on 64 GPUs: all-gather 43.7 ms and copy-out 5.2 ms,
reduce-scatter 94.2 ms and copy-in 12.4 ms, up to 14% of an iteration. There a copy is one kernel
per unit; here it runs on the CPU.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.engines import ENGINES, NUM_WARM, Training
from benchmarks.inspection import COPIES
from benchmarks.models import PRESETS, Batches
from benchmarks.optimizers.results import ROOT, circumstances, read, write
from benchmarks.other_models import OTHER_PRESETS
from torch.profiler import ProfilerActivity, profile, record_function

from vescale_fsdp.testing import run_ranks

__all__ = ["COUNTED", "FILE", "copies_of", "lines"]

FILE = ROOT / "benchmarks" / "results" / "copies.json"
MODELS = PRESETS | OTHER_PRESETS
NAMES = ("vescale", "fsdp2", "compute")
PARTS = {
    "fsdp::all_gather_copy_in": "gather in",
    "fsdp::split_with_sizes_copy": "gather out",
    "fsdp::chunk_cat": "reduce in",
}
REST, COLLECTIVES = "rest", "collectives"
COUNTED = (*PARTS.values(), REST)
_MARK = "step that is looked at"

Amounts = dict[str, tuple[int, float]]  # bytes and seconds, by part


def copies_of(training: Training) -> Amounts:
    """In one step, by part; what a process group copies is `COLLECTIVES`."""
    profiling = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with profiling as prof, record_function(_MARK):
        training.step()
    results = prof.profiler.kineto_results
    assert results is not None, "the profiler has stopped"
    found: Amounts = dict.fromkeys([*PARTS.values(), REST, COLLECTIVES], (0, 0.0))
    for event in results.experimental_event_tree():
        is_ours = event.name == _MARK  # else it is of a thread of gloo
        for part, num_bytes, seconds in _copies([event], REST if is_ours else COLLECTIVES):
            before = found[part]
            found[part] = before[0] + num_bytes, before[1] + seconds
    return found


def _copies(events: list[Any], part: str) -> Iterator[tuple[str, int, float]]:
    """Part, bytes and seconds of each operator that copies; of FSDP2's with what is in them."""
    for event in events:
        own = COLLECTIVES if event.name.startswith("c10d::") else PARTS.get(event.name, part)
        inner = list(_copies(event.children, own))
        seconds = event.duration_time_ns / 1e9
        if own != part and own != COLLECTIVES:
            yield own, sum(num_bytes for _, num_bytes, _ in inner), seconds
        elif inner:
            yield from inner
        elif event.name in COPIES:
            which = COPIES[event.name]
            given = event.extra_fields.inputs
            written = given[0] if which is None else [given[which]]
            yield part, sum(math.prod(t.sizes) * t.dtype.itemsize for t in written), seconds


def on_rank(model_name: str, precision: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Bytes of a step, seconds by round, and step times without the profiler."""
    torch.set_num_threads(1)
    preset, trainings = MODELS[model_name], {}
    dtype = torch.bfloat16 if precision == "bf16" else None
    for name in NAMES:
        torch.manual_seed(0)
        model, optimized = ENGINES[name](preset.make(), precision, dist.get_world_size())
        cast = dtype if name == "compute" else None
        batches = Batches(preset, dist.get_rank())
        trainings[name] = Training(model, optimized, batches, input_dtype=cast)
        for _ in range(NUM_WARM):
            trainings[name].step()
    found: dict[str, dict[str, Any]] = {
        name: {"bytes": {}, "seconds": {part: [] for part in COUNTED}, "step_s": []}
        for name in NAMES
    }
    for _ in range(rounds):
        for name, training in trainings.items():
            dist.barrier()
            training.step()  # not timed: the caches have data of another engine
            started = time.perf_counter()
            training.step()
            found[name]["step_s"].append(time.perf_counter() - started)
            copies = copies_of(training)
            for part in COUNTED:
                num_bytes, seconds = copies[part]
                found[name]["bytes"][part] = num_bytes
                found[name]["seconds"][part].append(seconds)
    return found


HEAD = [
    "model", "ranks", "precision", "engine", "gather in MB", "copy-out MB", "copy-in MB", "rest MB",
    "all ms", "% of its step",
]  # fmt: skip


def lines(path: Path = FILE) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table for RESULTS.md; ``rest`` without the model's own copies."""
    rows = []
    for key, found in read(path).get("cells", {}).items():
        for name in ("vescale", "fsdp2"):
            own, model = found[name], found["compute"]
            beyond = {p: own["bytes"][p] - model["bytes"][p] for p in own["bytes"]}
            seconds = _beyond(own["seconds"], model["seconds"])
            share = [a / b for a, b in zip(seconds, own["step_s"], strict=True)]
            rows.append(
                [
                    *key.split(", "), name, *(f"{each / 1e6:.2f}" for each in beyond.values()),
                    f"{1000 * median(seconds):.1f}", f"{100 * median(share):.1f}",
                ]
            )  # fmt: skip
    return HEAD, rows


def _beyond(own: dict[str, list[float]], model: dict[str, list[float]]) -> list[float]:
    """Seconds of all parts, round by round, less the model's."""
    totals = [[sum(each) for each in zip(*of.values(), strict=True)] for of in (own, model)]
    return [a - b for a, b in zip(*totals, strict=True)]


def main() -> int:
    """Measure, print and store. Existing cells are measured again."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.copies", description="Copies in a step, compared with FSDP2."
    )
    default = ["gpt-7m", "moe-10m", "vit-6m", "norms-1500", *OTHER_PRESETS]
    parser.add_argument("--models", nargs="+", default=default, choices=MODELS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    cells = read(args.out).get("cells", {})
    for model in args.models:
        for precision in args.precisions:
            call = (model, precision, args.rounds)
            key = f"{model}, {args.ranks}, {precision}"
            cells[key] = run_ranks(on_rank, args.ranks, *call, timeout_s=900)[0]
            write(args.out, {"circumstances": circumstances(), "cells": cells})
            print(f"{key}: done", file=sys.stderr, flush=True)
    for row in (HEAD, *lines(args.out)[1]):
        print("  ".join(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
