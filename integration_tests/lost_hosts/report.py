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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration_tests.faults.report import commit

from .faults import FAULTS, judged
from .hosts import IN_PROCESS, RANKS, RENDEZVOUS, RESTARTED, TORCHFT
from .runner import TIMEOUT_S, Report
from .trial import EVERY, EVERY_ON_DISK, STEP_S, TOLERANCE, Outcome
from .watch import Parts

BY_NAME = {fault.name: fault for fault in FAULTS}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "elastic-faults.md"
COMMAND = "python3 dev.py elastic"
FRAME = Path(__file__).with_name("page.md.in")
SECTION = Path(__file__).with_name("section.md.in")
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


# The kinds of runs on the page, and what a section says about each.
STOCK = "stock"
SECTIONS = {
    IN_PROCESS: (
        "Survivors keep their processes",
        "With `VESCALE_FSDP_MEETING` ([guide](elastic.md#without-a-restart)), and "
        "`torchrun --standalone` on each host.",
    ),
    RESTARTED: (
        "torchrun starts all ranks again",
        f"With `torchrun --nnodes 1:2` and `{RENDEZVOUS}`.",
    ),
}


@dataclass(frozen=True)
class Run:
    """What came of one call of the command, and of what.

    Attributes:
        facts: the commit, versions and others, as texts and numbers.
    """

    facts: dict[str, Any]
    report: Report


def facts_now(asked: int, seed: int, at_once: int, *, with_network: bool) -> dict[str, Any]:
    """The facts of a run that begins now."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "vescale-fsdp")]
    return {
        "asked": asked,
        "seed": seed,
        "at_once": at_once,
        "hosts": NETWORK if with_network else NO_NETWORK,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "cores": os.cpu_count(),
    }


def write(kind: str, run: Run) -> None:
    """Write the page and the raw numbers, with this run in place of the last of its kind."""
    _write({**read(), kind: run})


def write_again() -> None:
    """Write the page from the raw numbers that are there."""
    _write(read())


def _write(runs: Mapping[str, Run]) -> None:
    for kind in SECTIONS:
        for outcome in runs[kind].report.outcomes if kind in runs else ():
            outcome.fault = judged(BY_NAME[outcome.name], outcome)
    numbers = {
        "command": COMMAND, "ranks": 2 * RANKS, "per_host": RANKS, "step_s": STEP_S, "every": EVERY,
        "every_on_disk": EVERY_ON_DISK, "timeout": TIMEOUT_S, "hosts": NETWORK,
    }  # fmt: skip
    parts = [FRAME.read_text().format(**numbers)]
    parts += [_section(kind, runs[kind]) for kind in SECTIONS if kind in runs]
    if STOCK in runs or TORCHFT in runs:
        parts.append(_beside(runs))
    PAGE.write_text("\n".join(parts))
    raw = {
        kind: {"facts": run.facts, "report": dataclasses.asdict(run.report)}
        for kind, run in runs.items()
    }
    PAGE.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")


def _section(kind: str, run: Run) -> str:
    title, text = SECTIONS[kind]
    report, facts = run.report, run.facts
    num_faults = len(report.outcomes)
    is_part = num_faults < facts["asked"]
    stopped = f"; {facts['asked']} were asked for, and the time was up" if is_part else ""
    missed = [f"{each.name}: {each.fault}" for each in report.outcomes if each.fault]
    numbers = {
        "title": title,
        "text": text if facts["hosts"] == NETWORK else f"{text} {facts['hosts']}",
        "faults": f"{num_faults} faults in {report.num_trainings} trainings{stopped}",
        "minutes": report.seconds / 60 / facts.get("at_once", 1),
        "at_once": _at_once(facts.get("at_once", 1)),
        "num_steps": report.num_steps,
        "tolerance": TOLERANCE,
        "farthest": report.farthest,
        "farthest_loss": report.farthest_loss,
        "num_wrong": len(report.wrong),
        "num_hangs": sum(each.is_hang for each in report.outcomes),
        "num_odd": sum(bool(each.fault) and not each.is_hang for each in report.outcomes),
        "table": table(report.outcomes),
    }
    made = SECTION.read_text().format(**{"load": "", **facts, **numbers})
    if missed or report.wrong:
        made += (
            "\nMissed ([causes](design/elastic.md#what-random-faults-have-found)):\n\n"
            + "".join(f"- {each}\n" for each in missed + report.wrong)
        )
    return made


def _at_once(number: int) -> str:
    return "" if number == 1 else f", {number} trainings at a time"


def read() -> dict[str, Run]:
    """The runs of the page that is there."""
    file = PAGE.with_suffix(".json")
    raw = json.loads(file.read_text()) if file.exists() else {}
    return {kind: Run(each["facts"], _report(each["report"])) for kind, each in raw.items()}


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


NAMES = {
    IN_PROCESS: "same processes",
    RESTARTED: "started again",
    STOCK: "stock",
    TORCHFT: "torchft",
}


def _beside(runs: Mapping[str, Run]) -> str:
    """The faults that others had, with ours."""
    text = "## Beside stock torch and torchft\n\n"
    for kind in (STOCK, TORCHFT):
        if kind in runs:
            facts, report = runs[kind].facts, runs[kind].report
            text += (
                f"*{NAMES[kind]}*: measured on {facts['date']} at commit {facts['commit']}, with "
                f"{facts['versions']}{facts.get('load', '')}; largest difference of a loss from "
                f"the undisturbed run {report.farthest_loss:.1e}.\n"
            )
            text += "".join(f"  Wrong: {each}.\n" for each in report.wrong) + "\n"
    return text + beside_table(runs)


def beside_table(runs: Mapping[str, Run]) -> str:
    """A row for each fault and each kind of run, of the faults that others had too."""
    lines = [
        "| fault | | what happened | repeated | next step, s | "
        "meet + processes + state + step, s |",
        "|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        found = {
            kind: [each for each in run.report.outcomes if each.name == fault.name]
            for kind, run in runs.items()
        }
        if not (found.get(STOCK) or found.get(TORCHFT)):
            continue
        shown = fault.name
        for kind, name in NAMES.items():
            if rows := found.get(kind):
                cells = [shown, name, happened(rows), repeated(rows), spread(rows), split(rows)]
                lines.append("| " + " | ".join(cells) + " |")
                shown = ""
    return "\n".join(lines) + "\n"


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
