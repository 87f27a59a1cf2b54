"""Step time of one training with Lightning and Accelerate, compared with plain loops.

    python -m benchmarks.adapters                          # 10 minutes on two cores
    python -m benchmarks.adapters --models gpt-7m --loops plain-vescale lightning-vescale --rounds 3

Model, data, seed and optimizer are the same. Each loop has separate processes, and the loops
alternate. ``cost`` is a loop's time divided by that of the plain loop of the same engine. ``speed``
is the time of ``fsdp2`` with the same library divided by the loop's time. Both are computed within
a round. A loop that cannot run is left out, and the reason is printed. The packages are those of
`docs/lightning.md` and `docs/accelerate.md`. Accelerate does not support FSDP2 on CPU, so its
distributed type is set here.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.adapters.loops import LOOPS
from benchmarks.compare.spread import quartiles, ratios
from benchmarks.models import PRESETS
from benchmarks.optimizers.results import ROOT, circumstances, read, write
from benchmarks.slow_network import Place, counted_network, why_not
from benchmarks.team import Team

__all__ = ["FILE", "lines"]

FILE = ROOT / "benchmarks" / "results" / "adapters.json"


def measure(model: str, places: list[Place] | None, args: argparse.Namespace) -> dict[str, Any]:
    """Step and CPU seconds by round, and losses, of each loop."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        teams = {}
        for name in args.loops:
            team = Team(name, model, "fp32", args.ranks, places, "benchmarks.adapters.loops")
            stack.enter_context(team)
            try:
                team.start()
            except RuntimeError as error:
                found[name] = {"left_out": str(error)}
                print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
                team.close()
                continue
            teams[name] = team
            found[name] = {"step_s": [], "cpu_s": [], "losses": []}
            print(f"{name} is ready", file=sys.stderr, flush=True)
        for _ in range(args.rounds):
            for name, team in teams.items():
                turn = team.run(args.steps)
                found[name]["step_s"].append(turn.step_s)
                found[name]["cpu_s"].append(turn.cpu_s)
                found[name]["losses"] += turn.losses
    return found


HEAD = [
    "model", "ranks", "network", "loop", "ms", "quartiles", "cost, plain = 1", "quartiles",
    "CPU ms", "speed / FSDP2 there", "loss off plain DDP's",
]  # fmt: skip


def lines(path: Path = FILE) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table for RESULTS.md."""
    rows = []
    for key, found in read(path).get("cells", {}).items():
        for name, own in found.items():
            place = [*key.split(", "), name]
            if "left_out" in own:
                rows.append([*place, "left out", *[""] * (len(HEAD) - len(place) - 1)])
                continue
            low, middle, high = (1000 * each for each in quartiles(own["step_s"]))
            library, _, engine = name.partition("-")
            rows.append(
                [
                    *place, f"{middle:.0f}", f"{low:.0f} to {high:.0f}",
                    *_ratio(own, found.get(f"plain-{engine}")),
                    f"{1000 * median(own['cpu_s']):.0f}",
                    _ratio(found.get(f"{library}-fsdp2"), own)[0],
                    _off(own, found.get("plain-ddp")),
                ]
            )  # fmt: skip
    return HEAD, rows


def _ratio(of: dict[str, Any] | None, to: dict[str, Any] | None) -> tuple[str, str]:
    found = ratios(of["step_s"], to["step_s"]) if _are_there(of, to) else None  # type: ignore[index]
    return (f"{found[1]:.2f}", f"{found[0]:.2f} to {found[2]:.2f}") if found else ("", "")


def _off(own: dict[str, Any], plain: dict[str, Any] | None) -> str:
    if not _are_there(own, plain):
        return ""
    pairs = zip(own["losses"], plain["losses"], strict=True)  # type: ignore[index]
    return f"{max(abs(a - b) / abs(b) for a, b in pairs):.0e}"


def _are_there(*found: dict[str, Any] | None) -> bool:
    return all(each is not None and "step_s" in each for each in found)


def main() -> int:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adapters", description="The cost of adapters."
    )
    parser.add_argument("--models", nargs="+", default=["gpt-7m", "gpt-tiny"], choices=PRESETS)
    parser.add_argument("--loops", nargs="+", default=list(LOOPS), choices=LOOPS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--network", default="loopback", help="loopback, or a rate such as 1gbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rate = None if args.network == "loopback" else args.network
    reason = why_not()
    if rate and reason:
        sys.exit(f"no networks can be made here: {reason}")
    for model in args.models:
        with ExitStack() as stack:
            places = None
            if reason is None:
                places = stack.enter_context(counted_network(args.ranks, rate)).places
            found = measure(model, places, args)
        cells = read(args.out).get("cells", {})
        cells[f"{model}, {args.ranks}, {args.network}"] = found
        told = circumstances()
        told["versions"] |= {name: version(name) for name in ("lightning", "accelerate")}
        write(args.out, {"circumstances": told, "cells": cells})
    for row in (HEAD, *lines(args.out)[1]):
        print("  ".join(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
