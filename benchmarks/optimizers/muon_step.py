"""Time and bytes of a step of Muon on a network of a given speed.

    python -m benchmarks.optimizers.muon_step --model gpt-7m --ranks 4 --network 1gbit

Only the step of the optimizer is measured, on existing gradients; `muon_engines` lists the engines.
They alternate, round by round, and are compared within a round (see benchmarks/compare). Targets:
at most a third of the bytes of ``torch.optim.Muon`` on FSDP2, and at most half of its time.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare.spread import quartiles
from benchmarks.models import PRESETS
from benchmarks.optimizers.muon_engines import ENGINES
from benchmarks.optimizers.results import FOLDER, circumstances, read, write
from benchmarks.slow_network import Network, counted_network, why_not
from benchmarks.team import Team

BYTES_TARGET, TIME_TARGET = 1 / 3, 1 / 2


def measure(network: Network, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure each engine. Times are by round."""
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        teams = {
            name: stack.enter_context(
                Team(
                    name,
                    args.model,
                    "fp32",
                    args.ranks,
                    network.places,
                    "benchmarks.optimizers.muon_engines",
                )
            )
            for name in args.engines
        }
        for name, team in teams.items():
            expected = team.start()
            results[name] = {"expected_bytes": expected, "sent_bytes": 0.0, "step_s": []}
            print(f"{name} is ready", file=sys.stderr, flush=True)
        for _ in range(args.rounds):
            for name, team in teams.items():
                before = sum(network.sent_bytes())
                turn = team.run(args.steps)
                sent = (sum(network.sent_bytes()) - before) / (args.steps + 1) / args.ranks
                results[name]["sent_bytes"] += sent / args.rounds
                results[name]["step_s"].append(round(turn.step_s, 5))
                results[name].setdefault("cpu_s", []).append(round(turn.cpu_s, 5))
    return results


def verdicts(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare ours with FSDP2, and check the targets."""
    if not {"vescale", "fsdp2"} <= results.keys():
        return {}
    ours, theirs = results["vescale"], results["fsdp2"]
    pairs = zip(ours["step_s"], theirs["step_s"], strict=True)
    ratios = quartiles([a / b for a, b in pairs])
    share = ours["sent_bytes"] / theirs["sent_bytes"]
    return {
        "bytes": {"ratio": round(share, 4), "target": BYTES_TARGET, "met": share <= BYTES_TARGET},
        "time": {
            "ratio": round(ratios[1], 4),
            "quartiles": [round(ratios[0], 4), round(ratios[2], 4)],
            "target": TIME_TARGET,
            "met": ratios[1] <= TIME_TARGET,
        },
    }


def show(results: dict[str, dict[str, Any]], verdict: dict[str, Any]) -> None:
    """Print a table, and a line for each target."""
    print(
        f"{'engine':10} {'ms a step':>10} {'quartiles':>16} {'CPU ms':>8} {'MB sent':>9} expected"
    )
    for name, found in results.items():
        low, middle, high = (1000 * value for value in quartiles(found["step_s"]))
        cpu, sent = 1000 * median(found["cpu_s"]), found["sent_bytes"] / 1e6
        expected = f"{found['expected_bytes'] / 1e6:.3f}" if found["expected_bytes"] else ""
        spread = f"{low:.0f} to {high:.0f}"
        print(f"{name:10} {middle:10.1f} {spread:>16} {cpu:8.1f} {sent:9.3f} {expected}")
    for what, each in verdict.items():
        word = "met" if each["met"] else "NOT met"
        print(f"{what}: {each['ratio']:.3f} of FSDP2's, target {each['target']:.3f}: {word}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Step time and bytes of Muon, compared with FSDP2."
    )
    parser.add_argument("--model", choices=PRESETS, default="gpt-7m")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--network", default="1gbit", help="a rate such as 1gbit, or loopback")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of each engine per round")
    parser.add_argument("--out", type=Path, default=FOLDER / "muon_step.json")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no networks can be made here: {reason}")
    os.environ["OMP_NUM_THREADS"] = "1"
    rate = None if args.network == "loopback" else args.network
    with counted_network(args.ranks, rate) as network:
        if rate is not None:
            speeds = ", ".join(f"{speed / 1e6:.0f}" for speed in network.check())
            print(f"ranks receive {speeds} Mbit/s, limit {rate}", file=sys.stderr, flush=True)
        results = measure(network, args)
    verdict = verdicts(results)
    show(results, verdict)
    kept = read(args.out)
    key = f"{args.model}, {args.ranks} ranks, {args.network}"
    entry = {"circumstances": circumstances(), "engines": results, "targets": verdict}
    write(args.out, kept | {key: entry})


if __name__ == "__main__":
    main()
