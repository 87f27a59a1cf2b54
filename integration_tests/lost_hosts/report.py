"""docs/elastic-faults.md and docs/elastic-faults.json, from what was measured."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from integration_tests.faults.report import commit

from .faults import FAULTS, judged
from .hosts import RANKS, RENDEZVOUS
from .runner import TIMEOUT_S, Report
from .trial import EVERY, EVERY_ON_DISK, STEP_S, TOLERANCE, Outcome
from .watch import Parts

BY_NAME = {fault.name: fault for fault in FAULTS}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "elastic-faults.md"
COMMAND = "python3 dev.py elastic"
FRAME = Path(__file__).with_name("page.md.in")
NETWORK = (
    "Each host is a network namespace with an agent of `torchrun`, and memory of its own (a "
    "tmpfs). A switch connects them. A host that dies is cut off first, so that no other host "
    "gets a packet about it. The file of the rendezvous and the checkpoints are on a disk "
    "that all hosts reach, also while their network is cut."
)
NO_NETWORK = (
    "Each host is an agent of `torchrun` with a memory folder of its own. Faults that need "
    "network namespaces (root and `ip`) or a tmpfs were left out."
)


def write(ours: Report, stock: Report | None, asked: int, *, with_network: bool, load: str) -> None:
    """Write the page and the raw numbers."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "vescale-fsdp")]
    facts: dict[str, Any] = {
        "asked": asked,
        "hosts": NETWORK if with_network else NO_NETWORK,
        "rendezvous": RENDEZVOUS,
        "timeout": TIMEOUT_S,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "cores": os.cpu_count(),
        "load": load,
    }
    _write(ours, stock, facts)


def write_again() -> None:
    """Write the page from the raw numbers that are there."""
    ours, stock = read()
    _write(ours, stock, json.loads(PAGE.with_suffix(".json").read_text())["facts"])


def _write(ours: Report, stock: Report | None, facts: dict[str, Any]) -> None:
    for outcome in ours.outcomes:
        outcome.fault = judged(BY_NAME[outcome.name], outcome)
    num_faults = len(ours.outcomes)
    is_part = num_faults < facts["asked"]
    numbers = {
        "stopped": f"; {facts['asked']} were asked for, and the time was up" if is_part else "",
        "command": COMMAND,
        "ranks": 2 * RANKS,
        "per_host": RANKS,
        "step_s": STEP_S,
        "every": EVERY,
        "every_on_disk": EVERY_ON_DISK,
        "minutes": ours.seconds / 60,
        "num_faults": num_faults,
        "num_trainings": ours.num_trainings,
        "num_steps": ours.num_steps,
        "tolerance": TOLERANCE,
        "farthest": ours.farthest,
        "farthest_loss": ours.farthest_loss,
        "num_wrong": len(ours.wrong),
        "num_hangs": sum(each.is_hang for each in ours.outcomes),
        "num_odd": sum(bool(each.fault) and not each.is_hang for each in ours.outcomes),
    }
    text = FRAME.read_text().format(**facts, **numbers, table=table(ours.outcomes))
    if stock is not None:
        text += "\n## Stock torchrun with FSDP2 and DCP\n\n" + stock_table(ours, stock)
    missed = [f"{each.name}: {each.fault}" for each in ours.outcomes if each.fault] + ours.wrong
    if missed:
        text += "\n## Missed\n\n" + "".join(f"- {each}\n" for each in missed)
    PAGE.write_text(text)
    raw = {"facts": facts, "ours": dataclasses.asdict(ours)}
    if stock is not None:
        raw["stock"] = dataclasses.asdict(stock)
    PAGE.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")


def read() -> tuple[Report, Report | None]:
    """The reports of the page that is there."""
    raw = json.loads(PAGE.with_suffix(".json").read_text())
    return _report(raw["ours"]), _report(raw["stock"]) if "stock" in raw else None


def _report(raw: dict[str, Any]) -> Report:
    outcomes = []
    for each in raw["outcomes"]:
        parts = None if each["parts"] is None else Parts(**each["parts"])
        attempts = [tuple(one) for one in each["attempts"]]
        outcomes.append(Outcome(**{**each, "parts": parts, "attempts": attempts}))
    return Report(**{**raw, "outcomes": outcomes})


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each fault."""
    lines = [
        "| fault | times | expected | what happened | repeated | next step, s | "
        "meet + processes + state + step, s | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        rows = [each for each in outcomes if each.name == fault.name]
        if not rows:
            continue
        met = "**missed**" if any(each.fault for each in rows) else "met"
        cells = [
            fault.name, str(len(rows)), fault.expected, happened(rows), repeated(rows),
            spread(rows), split(rows), met,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def stock_table(ours: Report, stock: Report) -> str:
    """The faults that both had."""
    lines = [
        "| fault | | what happened | repeated | next step, s | "
        "meet + processes + state + step, s |",
        "|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        for name, report in (("veScale-FSDP", ours), ("stock", stock)):
            rows = [each for each in report.outcomes if each.name == fault.name]
            if not any(each.name == fault.name for each in stock.outcomes) or not rows:
                continue
            cells = [
                fault.name if name == "veScale-FSDP" else "", name, happened(rows),
                repeated(rows), spread(rows), split(rows),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n"
    if stock.wrong:
        text += "\nWrong in the stock trainings: " + "; ".join(stock.wrong) + ".\n"
    return text


def happened(rows: Sequence[Outcome]) -> str:
    """The kinds of what happened, the most frequent first."""
    kinds: Counter[str] = Counter()
    for row in rows:
        chain = [f"{size} ranks from {source}" for size, source, _ in row.attempts]
        text = ", then ".join(chain) or "no restart"
        if row.revived:
            text += f"; {row.revived} agents ended"
        kinds[f"hung ({row.fault})" if row.is_hang else text] += 1
    return "; ".join(f"{text}: {count} of {len(rows)}" for text, count in kinds.most_common())


def repeated(rows: Sequence[Outcome]) -> str:
    """The median and the most."""
    numbers = [row.repeated for row in rows]
    return f"{statistics.median(numbers):g}, at most {max(numbers)}"


def spread(rows: Sequence[Outcome]) -> str:
    """The median of the times, with the smallest and the largest; without those that hung."""
    seconds = [each.seconds for each in rows if not each.is_hang]
    if not seconds:
        return "none"
    median = f"{statistics.median(seconds):.1f}"
    if len(seconds) == 1:
        return median
    return f"{median} ({min(seconds):.1f} to {max(seconds):.1f})"


def split(rows: Sequence[Outcome]) -> str:
    """The medians of the parts."""
    parts = [row.parts for row in rows if row.parts is not None]
    if not parts:
        return "no new processes"
    kinds: list[Callable[[Parts], float]] = [
        lambda each: each.meeting,
        lambda each: each.starting,
        lambda each: each.restoring,
        lambda each: each.stepping,
    ]
    return " + ".join(f"{statistics.median(map(kind, parts)):.1f}" for kind in kinds)
