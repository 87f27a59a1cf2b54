"""docs/reliability.md and docs/reliability.json, from what was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

from .harness import Result, Scenario

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
COMMAND = "python3 dev.py faults"
COLUMNS = {
    "ours": "veScale-FSDP",
    "stock": "FSDP2 and DCP, one folder",
    "stock-folders": "FSDP2 and DCP, a folder per step",
}
Results = list[tuple[Scenario, dict[str, Result]]]
FRAME = """# Reliability

This page compares the behaviour under faults with stock torch (FSDP2 and
`torch.distributed.checkpoint`, DCP). `{command}` measures and writes it; the raw numbers are in
[reliability.json](reliability.json). A short form of the same trials runs with every change
(`integration_tests/faults`).

Processes and faults are real: 2 to 4 ranks on CPU with gloo, SIGKILL, changed files, full file
systems. A trial counts only with evidence that its fault has happened (exit status -9, bytes that
differ, ENOSPC for a write of its own). *Survivors* are the remaining ranks; the time is that from
the fault to the exception of the last of them. A rank that raises ends its process, as in a job
that does not catch the exception. The required result is **bold**. *Met* means that veScale-FSDP
had no other result, and that survivors raised within 5 seconds.

DCP is used as in its documentation: it saves over one folder, or into a new folder for each step.
In the second case the last folder with a `.metadata` is loaded.

Measured on {date} at commit {commit}, with {versions},
on {cores} CPU cores, in {minutes:.0f} minutes.
"""


def write(results: Results, minutes: float) -> None:
    """Write both files."""
    facts = {
        "command": COMMAND,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": ", ".join(
            [
                f"Python {platform.python_version()}",
                *(
                    f"{name} {importlib.metadata.version(name)}"
                    for name in ("torch", "vescale-fsdp")
                ),
            ]
        ),
        "cores": os.cpu_count(),
        "minutes": minutes,
    }
    raw = json.dumps({**facts, "results": [as_json(*each) for each in results]}, indent=1)
    PAGE.write_text(FRAME.format(**facts) + sections(results))
    PAGE.with_suffix(".json").write_text(raw + "\n")


def commit() -> str:
    """The one that is checked out, and whether files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--", "packages") else ""
    return f"{git('rev-parse', '--short=10', 'HEAD') or 'unknown'}{changed}"


def sections(results: Results) -> str:
    text = ""
    for group, rows in groupby(results, key=lambda each: each[0].group):
        text += table(group, list(rows))
    missed = [(s, r["ours"]) for s, r in results if r["ours"].faults(s.good)]
    if missed:
        text += "\n## Missed\n\n"
        for scenario, result in missed:
            faults = "; ".join(result.faults(scenario.good)) if not scenario.missed else ""
            text += wrapped(f"- {scenario.group}, {scenario.name}: {scenario.missed or faults}.")
    return text


def wrapped(line: str) -> str:
    """One item of a list, in lines of 100 characters."""
    lines, current = [], ""
    for word in line.split():
        if len(current) + 1 + len(word) > 100:
            lines.append(current)
            current = "  " + word
        else:
            current = f"{current} {word}" if current else word
    return "\n".join([*lines, current]) + "\n"


def table(group: str, rows: Results) -> str:
    """One section. A column that none of its rows has is left out."""
    columns = [key for key in COLUMNS if any(key in each for _, each in rows)]
    lines = [f"\n## {group[0].upper()}{group[1:]}\n"]
    lines.append("| fault | " + " | ".join(COLUMNS[key] for key in columns) + " | |")
    lines.append("|---|" + "---|" * len(columns) + "---|")
    for scenario, each in rows:
        cells = [cell(scenario, each.get(key)) for key in columns]
        verdict = "not run" if each["ours"].skipped else "met"
        verdict = "**missed**" if each["ours"].faults(scenario.good) else verdict
        lines.append(f"| {scenario.name} | " + " | ".join(cells) + f" | {verdict} |")
    return "\n".join(lines) + "\n"


def cell(scenario: Scenario, result: Result | None) -> str:
    """What was seen, the most frequent first."""
    if result is None:
        return "n/a"
    if result.skipped:
        return f"skipped: {result.skipped}"
    if scenario.group == "cost":
        return "; ".join(result.examples[key] for key in result.outcomes)
    parts = []
    for outcome, count in result.outcomes.most_common():
        name = f"**{outcome}**" if outcome in scenario.good else outcome
        parts.append(f"{name}: {count} of {result.num_trials}")
    hows = {how: count for how, count in result.survivors.items() if how != "raised"}
    parts += [
        f"{count} of {result.survivors.total()} survivors {how}" for how, count in hows.items()
    ]
    if result.slowest is not None:
        parts.append(f"survivors within {result.slowest:.2f} s")
    if result.num_invalid:
        parts.append(f"{result.num_invalid} without the fault")
    return "; ".join(parts)


def as_json(scenario: Scenario, each: dict[str, Result]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "group": scenario.group,
        "name": scenario.name,
        "good": sorted(scenario.good),
    }
    for engine, result in each.items():
        found[engine] = {
            **vars(result),
            "outcomes": dict(result.outcomes),
            "survivors": dict(result.survivors),
            "examples": {key: plain(text)[:400] for key, text in result.examples.items()},
        }
    return found


def plain(text: str) -> str:
    """Without the folders of this machine."""
    for folder in (ROOT, tempfile.gettempdir(), f"{sys.base_prefix}/", f"{sys.prefix}/"):
        text = text.replace(str(folder), "")
    return text.replace(str(Path.home()), "~")
