"""Compares the cost model with measured steps on limited networks, and states its error.

    python -m benchmarks.cost_model.check                  # 15 minutes on two cores
    python -m benchmarks.cost_model.check --models gpt-7m --networks 1gbit --rounds 3

The inputs of a prediction are:

* the time of a step without an engine (``compute``, measured in the same round), and its division
  among units
* the bytes of the plan
* the rate of the network, times the share of it that the engine's collectives reach alone
* the latency of a collective
* the CPU time of the engine without that of the model; for FSDP2, which waits for collectives, also
  without that of its collectives. It is added to compute in proportion to bytes

Share, latency and CPU time are measured only on the first network of ``--networks``. So steps on
the other networks are predicted without a measurement of the engine there. No step time except that
of ``compute`` is an input. As on CPU, our engine overlaps, and its all-gathers and reduce-scatters
alternate; FSDP2 waits for each collective.

The error is predicted / measured - 1: the median of the rounds, with quartiles. It needs Linux and
root (`benchmarks.slow_network`).
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare.record import source_digest
from benchmarks.compare.spread import quartiles, ratios
from benchmarks.cost_model.bytes_by_plan import UnitBytes, of_fsdp2, of_ours
from benchmarks.cost_model.parts import NUM_PINGS, Shares, shares_of
from benchmarks.cost_model.timing import UnitCost, run_step
from benchmarks.models import PRESETS
from benchmarks.optimizers.results import ROOT, circumstances, read, write
from benchmarks.slow_network import Network, bits_per_s, counted_network, why_not
from benchmarks.team import Team
from torch import nn

from vescale_fsdp.planner import TensorSpec
from vescale_fsdp_tune.costs import Link

__all__ = ["FILE", "lines"]

FILE = ROOT / "benchmarks" / "results" / "cost_model" / "check.json"
PARTS = ("compute", "wire", "wire-fsdp2", "ping", "vescale", "fsdp2")
WIRES = {"vescale": "wire", "fsdp2": "wire-fsdp2"}


@dataclass(frozen=True)
class Turns:
    """The measurements of one engine or part, by round."""

    step_s: list[float]
    cpu_s: list[float]
    expected_bytes: float


@dataclass(frozen=True)
class Reach:
    """The performance of collectives alone on one network.

    Attributes:
        share: of its rate, by engine.
        host_s: CPU time of an engine in a step, without that of the model.
        latency_s: of one collective.
    """

    share: dict[str, float]
    host_s: dict[str, float]
    latency_s: float


def measure(network: Network, model: str, args: argparse.Namespace) -> dict[str, Turns]:
    """Measure all parts, which alternate."""
    found = {}
    with ExitStack() as stack:
        teams = {
            name: stack.enter_context(
                Team(
                    name,
                    model,
                    args.precision,
                    args.ranks,
                    network.places,
                    "benchmarks.cost_model.parts",
                )
            )
            for name in PARTS
        }
        for name, team in teams.items():
            found[name] = Turns([], [], team.start())
            print(f"{name} is ready", file=sys.stderr, flush=True)
        for _ in range(args.rounds):
            for name, team in teams.items():
                turn = team.run(args.steps)
                found[name].step_s.append(turn.step_s)
                found[name].cpu_s.append(turn.cpu_s)
    return found


def unit_bytes(model: nn.Module, num_ranks: int, precision: str, engine: str) -> list[UnitBytes]:
    """Of the root, and of each block."""
    blocks: Any = model.blocks
    inner = {id(param) for param in blocks.parameters()}
    root = [each for each in model.named_parameters() if id(each[1]) not in inner]
    units = [root, *(list(block.named_parameters()) for block in blocks)]
    found = []
    for unit in units:
        specs = [TensorSpec(name, tuple(param.shape), 1) for name, param in unit]
        size = 2 if precision == "bf16" else 4
        if engine == "vescale":  # on gloo gradients are sent in the compute dtype
            found.append(of_ours(specs, num_ranks, param_bytes=size, reduce_bytes=size))
        else:
            found.append(of_fsdp2(specs, num_ranks, param_bytes=size, over_gloo=True))
    return found


def reach_of(found: dict[str, Turns], rate: float) -> Reach:
    """Compute `Reach` from the measurements on one network, without step times of engines."""
    share, host_s = {}, {}
    for engine, wire in WIRES.items():
        share[engine] = found[wire].expected_bytes / median(found[wire].step_s) / rate
        beyond = median(found[engine].cpu_s) - median(found["compute"].cpu_s)
        # An engine that waits for collectives has their CPU time in its own.
        waited = 0.0 if engine == "vescale" else median(found[wire].cpu_s)
        host_s[engine] = max(beyond - waited, 0.0)
    return Reach(share, host_s, median(found["ping"].step_s) / NUM_PINGS)


def predict(
    engine: str,
    sent: list[UnitBytes],
    shares: Shares,
    compute_s: float,
    link: Link,
    host_s: float,
) -> float:
    """Seconds of a step."""
    is_ours = engine == "vescale"
    host_s_per_byte = host_s / total_bytes(sent)

    def cost(share: tuple[float, float], each: UnitBytes, *, is_kept: bool = False) -> UnitCost:
        again = each.reduce if is_kept else each.gather + each.reduce
        return UnitCost(
            share[0] * compute_s + host_s_per_byte * each.gather,
            share[1] * compute_s + host_s_per_byte * again,
            each.gather,
            each.reduce,
        )

    step = run_step(
        cost(shares.root, sent[0], is_kept=True),
        [cost(share, each) for share, each in zip(shares.blocks, sent[1:], strict=True)],
        link,
        overlaps=is_ours,
        takes_turns=is_ours,
        optimizer_s=shares.optimizer * compute_s,
    )
    return step.step_s


def total_bytes(sent: list[UnitBytes]) -> int:
    """Return the bytes of a step. The root, which is first, is gathered once, the others twice."""
    gathered = 2 * sum(each.gather for each in sent) - sent[0].gather
    return gathered + sum(each.reduce for each in sent)


def judge(
    found: dict[str, Turns], model: str, rate: float, reach: Reach, args: argparse.Namespace
) -> dict[str, Any]:
    """Return predicted and measured steps, by engine."""
    preset = PRESETS[model]
    shares = shares_of(preset, args.precision, args.ranks)
    entry: dict[str, Any] = {}
    for engine in WIRES:
        sent = unit_bytes(preset.make(), args.ranks, args.precision, engine)
        planned, expected = total_bytes(sent), found[engine].expected_bytes
        assert planned == expected, f"{engine}: {planned} bytes by plan, {expected} by its calls"
        link = Link(rate * reach.share[engine], reach.latency_s)
        predicted = [
            predict(engine, sent, shares, compute_s, link, reach.host_s[engine])
            for compute_s in found["compute"].step_s
        ]
        entry[engine] = {
            "measured_s": found[engine].step_s,
            "predicted_s": predicted,
            "bytes": expected,
        }
    entry["parts"] = {
        name: {"step_s": found[name].step_s, "cpu_s": found[name].cpu_s} for name in PARTS
    }
    return entry


HEAD = [
    "model", "ranks", "network", "engine", "measured ms", "predicted ms", "error %", "quartiles",
    "measured ours / FSDP2", "predicted",
]  # fmt: skip


def lines(path: Path = FILE) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table for RESULTS.md."""
    rows = []
    for key, entry in read(path).get("cells", {}).items():
        model, ranks, network, *_ = key.split(", ")
        speeds = [
            ratios(entry["fsdp2"][which], entry["vescale"][which])
            for which in ("measured_s", "predicted_s")
        ]
        for engine in WIRES:
            low, middle, high = quartiles(_errors(entry[engine]))
            times = [1000 * median(entry[engine][k]) for k in ("measured_s", "predicted_s")]
            ours = [f"{each[1]:.2f}" if each else "" for each in speeds]
            rows.append(
                [
                    model, ranks, network, engine, *(f"{each:.0f}" for each in times),
                    f"{middle:+.0f}", f"{low:+.0f} to {high:+.0f}",
                    *(ours if engine == "vescale" else ["", ""]),
                ]
            )  # fmt: skip
    return HEAD, rows


def _errors(found: dict[str, list[float]]) -> list[float]:
    pairs = zip(found["predicted_s"], found["measured_s"], strict=True)
    return [100 * (predicted / measured - 1) for predicted, measured in pairs]


def main() -> int:
    """Measure what is missing, predict, print and store."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_model.check", description="Predicted and measured steps."
    )
    parser.add_argument("--models", nargs="+", default=["gpt-7m", "moe-10m"], choices=PRESETS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--networks", nargs="+", default=["1gbit", "500mbit", "200mbit"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no networks can be made here: {reason}")
    os.environ["OMP_NUM_THREADS"] = "1"
    source = source_digest()
    kept = read(args.out)
    cells = kept["cells"] if kept.get("source") == source and not args.fresh else {}
    for model in args.models:
        place = f"{model}, {args.ranks} ranks"
        reach: Reach | None = None
        for name in args.networks:
            key = f"{place}, {name}, {args.precision}"
            if key in cells:
                reach = reach or Reach(**cells[key]["reach"])
                continue
            with counted_network(args.ranks, name) as network:
                network.check()
                found = measure(network, model, args)
            rate = bits_per_s(name) / 8
            reach = reach or reach_of(found, rate)
            cells[key] = judge(found, model, rate, reach, args)
            cells[key]["reach"] = asdict(reach)
            told = {"circumstances": circumstances(), "source": source, "cells": cells}
            write(args.out, told)
    for row in (HEAD, *lines(args.out)[1]):
        print("  ".join(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
