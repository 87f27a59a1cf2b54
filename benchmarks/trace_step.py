"""Shows how long a step waits for collectives, and how busy the network is meanwhile.

    python -m benchmarks.trace_step --model gpt-7m --engine vescale --network 1gbit

It prints how long the computing thread waited, by cause, how busy the network was in each part of
the step, and every collective of one step. ``--json`` writes the events of all steps and ranks in
the format of https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from benchmarks.models import PRESETS
from benchmarks.slow_network import bits_per_s, counted_network
from benchmarks.team import Team
from benchmarks.tracing import Event, Trace
from rich.console import Console
from rich.table import Table

PARTS = ("forward", "backward", "optimizer")
KINDS = ("gather", "reduce", "sum", "send", "receive")


def spans(trace: Trace) -> list[tuple[str, float, float]]:
    """Name, begin and end of each part of each step."""
    ends = [at for _, at in trace.marks[1:]]
    pairs = zip(trace.marks, ends, strict=False)
    return [(name, begin, end) for (name, begin), end in pairs if name in PARTS]


def step_starts(trace: Trace) -> list[float]:
    """When each step began."""
    return [at for name, at in trace.marks if name == "forward"]


def busy_share(samples: list[tuple[float, int]], begin: float, end: float, rate: float) -> float:
    """Return which share of ``rate`` (bytes per second) was sent between two times."""
    inside = [(at, sent) for at, sent in samples if begin <= at <= end]
    if len(inside) < 2 or end <= begin:
        return 0.0
    return (inside[-1][1] - inside[0][1]) / ((inside[-1][0] - inside[0][0]) * rate)


def show(
    trace: Trace,
    samples: list[tuple[float, int]],
    rate: float | None,
    num_ranks: int,
    console: Console,
) -> None:
    """Print where rank 0 waited, part by part and collective by collective."""
    num_steps = len(step_starts(trace))
    table = Table(title="rank 0, mean of the steps", title_justify="left")
    for column in ("part", "ms", *(f"waiting: {kind}" for kind in KINDS), "network"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part in PARTS:
        own = [(begin, end) for name, begin, end in spans(trace) if name == part]
        waits = {
            kind: sum(e.waited_s for e in trace.events if (e.phase, e.kind) == (part, kind))
            for kind in KINDS
        }
        share = ""
        if rate is not None:
            share = f"{statistics.mean(busy_share(samples, *each, rate) for each in own):.0%}"
        total = sum(end - begin for begin, end in own)
        columns = [total, *waits.values()]
        table.add_row(part, *(f"{1000 * each / num_steps:.0f}" for each in columns), share)
    console.print(table)
    console.print(_last_step(trace, rate, num_ranks))


def _last_step(trace: Trace, rate: float | None, num_ranks: int) -> Table:
    """Every collective of one step, in the order of issue."""
    start = step_starts(trace)[-1]
    table = Table(title="the last step, ms since its start", title_justify="left")
    for column in ("", "kB", "issued", "ended", "took", "at line rate", "waited from", "waited"):
        table.add_column(column, justify="right")
    for name, at in [mark for mark in trace.marks if mark[1] >= start]:
        table.add_row(name, "", f"{1000 * (at - start):.0f}", style="bold")
    events: list[tuple[float, Event]] = [(e.issued, e) for e in trace.events if e.issued >= start]
    for at, event in events:
        # A rank already has its own part of a collective. A message is sent completely.
        travels = 1.0 if event.kind in ("send", "receive") else (num_ranks - 1) / num_ranks
        ideal = f"{1000 * event.num_bytes * travels / rate:.1f}" if rate else ""
        table.add_row(
            event.kind,
            f"{event.num_bytes / 1e3:.0f}",
            f"{1000 * (at - start):.1f}",
            f"{1000 * (event.ended - start):.1f}",
            f"{1000 * (event.ended - at):.1f}",
            ideal,
            f"{1000 * (event.waited_from - start):.1f}",
            f"{1000 * event.waited_s:.1f}",
        )
    return table


def perfetto(traces: list[Trace]) -> list[dict[str, object]]:
    """Events for Chrome's and Perfetto's trace viewers: a process a rank."""
    found: list[dict[str, object]] = []

    def add(rank: int, row: str, name: str, begin: float, end: float) -> None:
        found.append(
            {"ph": "X", "pid": rank, "tid": row, "name": name, "ts": begin * 1e6}
            | {"dur": (end - begin) * 1e6}
        )

    for rank, trace in enumerate(traces):
        for name, begin, end in spans(trace):
            add(rank, "step", name, begin, end)
        for index, event in enumerate(trace.events):
            name = f"{event.kind} {event.num_bytes / 1e3:.0f} kB"
            add(rank, f"{event.kind} {index % 3}", name, event.issued, event.ended)
            if event.waited_s > 0:
                add(rank, "wait", f"for {name}", event.waited_from, event.waited_to)
    return found


def main() -> None:
    """Trace one engine on one network."""
    parser = argparse.ArgumentParser(description="Waits and network use in a step.")
    parser.add_argument("--model", default="gpt-7m", choices=PRESETS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--network", default="1gbit", help="loopback, 1gbit, ...")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--engine", default="vescale", help="or fsdp2")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the events")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rate = None if args.network == "loopback" else args.network
    with counted_network(args.ranks, rate) as network:
        print("starting", file=sys.stderr, flush=True)
        with Team(args.engine, args.model, args.precision, args.ranks, network.places) as team:
            team.start()
            with network.sampled() as samples:
                traces = team.trace(args.steps)
    limit = bits_per_s(rate) / 8 if rate else None
    show(traces[0], samples, limit, args.ranks, Console(width=120))
    if args.json:
        args.json.write_text(json.dumps(perfetto(traces)))


if __name__ == "__main__":
    main()
