"""Runs the steps of `rank` in processes of their own, with a hard limit, and reads the reports."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START = "start"  # what has failed if there are no processes at all
LIMIT_S = 60.0  # for a step; all take about 5 s, but an import from a cold disk may take half of it
_GRACE_S = 3.0  # for the others, once one rank has ended
_POLL_S = 0.05
# With the path of this process, so that a rank finds the same packages, however they are found.
_CODE = """
import json, sys
path, *arguments = json.loads(sys.argv[1])
sys.path[:] = path
from vescale_fsdp.cli.checkup.rank import main
main(*arguments)
"""


@dataclass
class Outcome:
    """What came of the steps.

    Attributes:
        values: of the steps that all ranks have done, as the first rank reports them.
        seconds: that each of these took, on the slowest rank.
        failed: the first step that some rank has not done; None if all are done.
        error: what is known of why.
        total_s: from start to end.
    """

    values: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: str | None = None
    error: str = ""
    total_s: float = 0.0


def run_steps(
    steps: Sequence[str],
    world_size: int,
    environ: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> Outcome:
    """Do these steps of `rank` in processes of their own. Leaves no process and no file behind.

    Args:
        environ: of the processes; this one's, if None.
        limit_s: processes that have reported no further step for so long are killed.
    """
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(
            prefix="vescale-fsdp-doctor-", ignore_cleanup_errors=True
        ) as folder:
            outcome = _run(Path(folder), steps, world_size, environ, limit_s)
    except OSError as error:
        outcome = Outcome(failed=START, error=f"{type(error).__name__}: {error}")
    outcome.total_s = time.monotonic() - begin
    return outcome


def _run(
    folder: Path,
    steps: Sequence[str],
    world_size: int,
    environ: Mapping[str, str] | None,
    limit_s: float,
) -> Outcome:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            processes.append(_start(rank, world_size, folder, steps, environ))
        _wait(processes, folder, limit_s)
    finally:
        codes = [process.poll() for process in processes]
        _kill(processes)
    reports = [_read_report(folder / f"report-{rank}.jsonl") for rank in range(world_size)]
    ends = [_end(code, folder / f"log-{rank}.txt") for rank, code in enumerate(codes)]
    return _combine(steps, reports, ends, limit_s)


def _start(
    rank: int,
    world_size: int,
    folder: Path,
    steps: Sequence[str],
    environ: Mapping[str, str] | None,
) -> subprocess.Popen[bytes]:
    arguments = json.dumps([sys.path, rank, world_size, str(folder), list(steps)])
    with (folder / f"log-{rank}.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _CODE, arguments],
            stdin=subprocess.PIPE,  # its end tells the rank that this process is gone
            stdout=log,
            stderr=log,
            env=None if environ is None else dict(environ),
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> None:
    """Wait for all of them, or until there was no news of them for too long."""
    last_news, size = time.monotonic(), 0
    ends_at = math.inf  # for the others, once one has ended
    while num_running := sum(process.poll() is None for process in processes):
        now = time.monotonic()
        new_size = sum(path.stat().st_size for path in folder.glob("report-*"))
        if new_size != size:
            last_news, size = now, new_size
        if num_running < len(processes):
            ends_at = min(ends_at, now + _GRACE_S)
        if now > min(last_news + limit_s, ends_at):
            return
        time.sleep(_POLL_S)


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


def _read_report(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError:
        return []
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # killed in the middle of one
            lines.append(json.loads(line))
    return lines


def _end(code: int | None, log: Path) -> str:
    """How a rank ended that has not reported its next step; empty if it did not end."""
    if code is None:
        return ""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    how = f"exit code {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            how = f"signal {signal.Signals(-code).name}"
    return f"its process ended with {how}" + (f": {said[-1]}" if said else "")


def _combine(
    steps: Sequence[str], reports: list[list[dict[str, Any]]], ends: list[str], limit_s: float
) -> Outcome:
    """One result of what the ranks report, and of how those ended that report too little."""
    outcome = Outcome()
    for index, step in enumerate(steps):
        lines = [report[index] if index < len(report) else {} for report in reports]
        if all("seconds" in line for line in lines):
            outcome.values[step] = lines[0]["value"]
            outcome.seconds[step] = max(line["seconds"] for line in lines)
            continue
        # A rank that raised says more than one that died, and that more than one that waited.
        raised = [(rank, line["error"]) for rank, line in enumerate(lines) if "error" in line]
        died = [(rank, ends[rank]) for rank, line in enumerate(lines) if not line and ends[rank]]
        hung = [(rank, f"no answer within {limit_s:g} s") for rank, line in enumerate(lines)]
        rank, error = (raised + died + hung)[0]
        outcome.failed = step
        outcome.error = " ".join((f"rank {rank}: {error}" if len(reports) > 1 else error).split())
        break
    return outcome
