"""Step time of one model under several engines, beside what compute and network need alone.

    python -m benchmarks.step_time --model gpt-7m --ranks 2 --network 1gbit --precision fp32 bf16

Each engine has processes of its own, one a rank, all started before anything is measured. Then
they take turns of a few steps, round by round: A B C A B C. So noise of the machine hits all of
them, and what is compared is what was measured within one round.

The limit of a step is the longer of ``compute`` and ``wire``: a step that overlaps one with the
other perfectly takes that long. Both run on all ranks at once, as the step does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

from benchmarks.models import PRESETS
from benchmarks.slow_network import Network, counted_network, why_not
from benchmarks.team import Team
from rich.console import Console
from rich.table import Table

DEFAULT = ["vescale", "fsdp2", "compute", "wire"]


@dataclass
class Result:
    """What one engine did in one configuration; lists are by round."""

    engine: str
    step_s: list[float] = field(default_factory=list)  # median of the round's steps, mean of ranks
    cpu_s: list[float] = field(default_factory=list)  # of a process, per step, mean of ranks
    sent_bytes: float = 0.0  # per step and rank, through the interface; 0: not counted
    expected_bytes: float = 0.0
    peak_bytes: int = 0  # resident, since before the model was made; the largest of the ranks
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Configuration:
    """One row of the grid."""

    model: str
    ranks: int
    network: str
    precision: str

    def __str__(self) -> str:
        return f"{self.model}, {self.ranks} ranks, {self.network}, {self.precision}"


def measure(
    configuration: Configuration,
    network: Network | None,
    engines: list[str],
    rounds: int,
    steps: int,
) -> list[Result]:
    """Let the engines take turns on a network; the results in the order of ``engines``."""
    results = [Result(engine) for engine in engines]
    with ExitStack() as stack:
        places = network.places if network else None
        teams = [
            stack.enter_context(
                Team(
                    engine,
                    configuration.model,
                    configuration.precision,
                    configuration.ranks,
                    places,
                )
            )
            for engine in engines
        ]
        for team, result in zip(teams, results, strict=True):
            result.expected_bytes = team.start()
        sent = [0] * len(engines)
        for _ in range(rounds):
            for index, (team, result) in enumerate(zip(teams, results, strict=True)):
                before = sum(network.sent_bytes()) if network else 0
                turn = team.run(steps)
                sent[index] += (sum(network.sent_bytes()) if network else 0) - before
                result.step_s.append(turn.step_s)
                result.cpu_s.append(turn.cpu_s)
                result.losses += turn.losses
                result.peak_bytes = turn.peak_bytes
        for result, total in zip(results, sent, strict=True):
            result.sent_bytes = total / (rounds * (steps + 1)) / configuration.ranks
    return results


def limits(results: list[Result]) -> list[float]:
    """The longer of compute and wire, by round; empty if they were not measured."""
    parts = [result.step_s for result in results if result.engine in ("compute", "wire")]
    return [max(pair) for pair in zip(*parts, strict=True)] if len(parts) == 2 else []


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """25%, 50% and 75% of the values."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def show(configuration: Configuration, results: list[Result], console: Console) -> None:
    """Print a table of the engines in one configuration."""
    table = Table(title=str(configuration), title_justify="left")
    table.add_column("engine")
    for column in (
        "ms a step", "quartiles", "CPU ms", "tokens/s", "speed / FSDP2", "of the limit",
        "MB sent", "expected", "peak MB", "loss",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    limit = limits(results)
    theirs = next((each.step_s for each in results if each.engine == "fsdp2"), [])
    tokens = PRESETS[configuration.model].tokens * configuration.ranks
    for result in results:
        low, middle, high = (1000 * value for value in quartiles(result.step_s))
        is_part = result.engine in ("compute", "wire")
        table.add_row(
            result.engine,
            f"{middle:.0f}",
            f"{low:.0f} to {high:.0f}",
            f"{1000 * statistics.median(result.cpu_s):.0f}",
            f"{tokens / middle * 1000:.0f}",
            "" if is_part else _ratio(theirs, result.step_s),
            "" if is_part else _ratio(limit, result.step_s),
            f"{result.sent_bytes / 1e6:.2f}" if result.sent_bytes else "",
            f"{result.expected_bytes / 1e6:.2f}",
            f"{result.peak_bytes / 1e6:.0f}",
            "" if is_part else f"{result.losses[-1]:.6f}",
        )
    console.print(table)


def _ratio(of: list[float], to: list[float]) -> str:
    """Median and quartiles of the ratios within a round."""
    ratios = [a / b for a, b in zip(of, to, strict=True)] if of else []
    if not ratios:
        return ""
    low, middle, high = quartiles(ratios)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def run(configuration: Configuration, args: argparse.Namespace) -> list[Result]:
    """Make the network, measure, and say whether the limit held."""
    print(f"{configuration}: starting", file=sys.stderr, flush=True)
    rate = None if configuration.network == "loopback" else configuration.network
    if reason := why_not():
        if rate is not None:
            sys.exit(f"no networks of a given speed can be made here: {reason}")
        return measure(configuration, None, args.engines, args.rounds, args.steps)
    with counted_network(configuration.ranks, rate) as network:
        if rate is not None:
            speeds = ", ".join(f"{speed / 1e6:.0f}" for speed in network.check())
            print(f"ranks receive {speeds} Mbit/s, limit {rate}", file=sys.stderr, flush=True)
        return measure(configuration, network, args.engines, args.rounds, args.steps)


def main() -> None:
    """Measure all configurations asked for."""
    parser = argparse.ArgumentParser(description="Step time of several engines in one run.")
    parser.add_argument("--model", nargs="+", default=["gpt-7m"], choices=PRESETS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--network", nargs="+", default=["loopback"], help="loopback, 1gbit, ...")
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument(
        "--engines", nargs="+", default=DEFAULT, help="also: ddp, vescale-int8, ..."
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="of each engine in each round")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    console, records = Console(width=150), []
    grid = product(args.model, args.ranks, args.network, args.precision)
    for configuration in (Configuration(*each) for each in grid):
        results = run(configuration, args)
        show(configuration, results, console)
        records.append({**asdict(configuration), "results": [asdict(each) for each in results]})
        if args.json:
            args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
