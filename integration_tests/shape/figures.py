"""The figures: what they are now, what the file says, and how the file is lowered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .lines import ROOT, code_lines_of_packages, shared_names

FILE = Path(__file__).with_name("figures.toml")
_NOTICED = 0.98  # of what the file says: below that it has to be lowered

Figures = dict[str, int]


def _run(module: str, *arguments: str) -> Any:
    """What a module of this folder prints in a process of its own."""
    call = [sys.executable, "-W", "ignore", "-m", f"integration_tests.shape.{module}", *arguments]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _code_lines() -> tuple[Figures, object]:
    return code_lines_of_packages(), None


def _names() -> tuple[Figures, object]:
    shared = shared_names()
    return {"classes": len(shared)}, shared


def _walk() -> tuple[Figures, object]:
    walks = _run("walk")
    figures = {}
    for what, calls in walks.items():
        figures |= {f"{what}_files": len(calls), f"{what}_calls": sum(calls.values())}
    return figures, walks


def _reach_of(subject: str) -> Callable[[], tuple[Figures, object]]:
    def count() -> tuple[Figures, object]:
        found = _run("reach", subject)
        return {what: len(names) for what, names in found.items()}, found

    return count


# The tables of the file: each counts, and says what it has counted.
TABLES: dict[str, Callable[[], tuple[Figures, object]]] = {
    "code_lines": _code_lines,
    "shared_names": _names,
    "walk": _walk,
    "torch": _reach_of("torch"),
    "frameworks": _reach_of("frameworks"),
}


def in_file(text: str) -> dict[str, Figures]:
    """The figures of a file's text."""
    return tomllib.loads(text)


def faults(now: Figures, said: Figures) -> list[str]:
    """What is wrong with the file, one sentence each."""
    found = [
        f"{name} is {now[name]}, and has no figure" for name in sorted(now.keys() - said.keys())
    ]
    found += [f"{name} is there no more: remove it" for name in sorted(said.keys() - now.keys())]
    for name in sorted(now.keys() & said.keys()):
        if now[name] > said[name]:
            found.append(
                f"{name} is {now[name]}, above {said[name]}. Make it less; or raise it in "
                f"{FILE.name}, with a comment that says what it is for"
            )
        elif now[name] < _NOTICED * said[name]:
            found.append(f"{name} is {now[name]}, not {said[name]}: lower it")
    return found


def lowered(text: str, now: dict[str, Figures]) -> str:
    """The file's text with what has become less, and all else as it is."""
    lines, table = [], ""
    for line in text.splitlines():
        if match := re.fullmatch(r"\[(\w+)\].*", line):
            table = match[1]
        match = re.fullmatch(r"(\w+) = (\d+)", line)
        if match is not None and match[1] not in now[table]:
            continue
        if match is not None:
            line = f"{match[1]} = {min(int(match[2]), now[table][match[1]])}"
        lines.append(line)
    return "\n".join([*lines, ""])
