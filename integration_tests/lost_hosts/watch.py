"""Reads what the ranks report while they train: steps, attempts, and the times of a restart."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass
class Process:
    """One process of a rank. Times are in seconds since 1970; None: it has not come to that."""

    host: str
    rank: int
    began: float | None = None
    connected: float | None = None
    restored: float | None = None
    attempt: int | None = None
    source: str = ""
    size: int = 0
    from_step: int = 0
    error: str = ""


@dataclass(frozen=True)
class Made:
    """A step that a rank has finished."""

    at: float
    step: int
    loss: float
    size: int
    attempt: int
    rank: int


@dataclass(frozen=True)
class Parts:
    """Where the time from a fault to the next finished step has gone, in seconds.

    Attributes:
        meeting: until the last new process has begun: ranks and agents notice, agents meet again.
        starting: of the processes, until all are connected: Python, torch, the model.
        restoring: until all have their state.
        stepping: until the first step is made.
    """

    meeting: float
    starting: float
    restoring: float
    stepping: float

    @property
    def total(self) -> float:
        return self.meeting + self.starting + self.restoring + self.stepping


@dataclass
class Attempt:
    """An attempt as its ranks have reported it."""

    number: int
    size: int
    source: str
    from_step: int
    processes: list[Process] = field(default_factory=list)
    first: Made | None = None  # its first step that all of its ranks have finished
    repeated: int = 0  # steps that the attempt before had finished, or begun with

    def parts(self, at: float) -> Parts | None:
        """The parts of the time since ``at``; None if no step was made, or it began before."""
        if self.first is None or len(self.processes) < self.size:
            return None
        began = max(each.began or 0.0 for each in self.processes)
        connected = max(each.connected or 0.0 for each in self.processes)
        restored = max(each.restored or 0.0 for each in self.processes)
        if min(each.began or 0.0 for each in self.processes) < at:
            return None
        return Parts(began - at, connected - began, restored - connected, self.first.at - restored)


class Watch:
    """All that was reported in a folder so far. Call `read` to go on.

    Args:
        folder: that of the events.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.processes: dict[Path, Process] = {}
        self.made: list[Made] = []
        self.num_done = 0

    def read(self) -> None:
        """Read the lines that are new."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in whole.splitlines():
                self._take(path, json.loads(line))

    def _take(self, path: Path, line: dict[str, Any]) -> None:
        process = self.processes.setdefault(path, Process(line["host"], line["rank"]))
        what, at = line["what"], line["at"]
        if what == "began":
            process.began = at
        elif what == "connected":
            process.connected = at
        elif what == "restored":
            process.restored, process.attempt = at, line["attempt"]
            process.source, process.size = line["source"], line["size"]
            process.from_step = line["step"]
        elif what == "step":
            made = Made(at, line["step"], line["loss"], line["size"], line["attempt"], line["rank"])
            self.made.append(made)
        elif what == "error":
            process.error = line["text"]
        elif what == "done":
            self.num_done += 1

    def attempts(self) -> list[Attempt]:
        """The attempts in which a rank has got a state, in order of their numbers."""
        found: dict[int, Attempt] = {}
        for each in self.processes.values():
            if each.attempt is not None:
                new = Attempt(each.attempt, each.size, each.source, each.from_step)
                found.setdefault(each.attempt, new).processes.append(each)
        reports: dict[int, dict[int, list[Made]]] = {}
        for made in self.made:
            reports.setdefault(made.attempt, {}).setdefault(made.step, []).append(made)
        ended = 0
        for number in sorted(found):
            attempt = found[number]
            attempt.repeated = max(0, ended - attempt.from_step)
            ended = attempt.from_step
            for step, of_ranks in reports.get(number, {}).items():
                ended = max(ended, step + 1)
                if len({made.rank for made in of_ranks}) == attempt.size:
                    last = max(of_ranks, key=lambda made: made.at)
                    if attempt.first is None or last.step < attempt.first.step:
                        attempt.first = last
        return [found[number] for number in sorted(found)]

    def newest(self) -> Attempt | None:
        """The last attempt, if there is one."""
        attempts = self.attempts()
        return attempts[-1] if attempts else None

    def steps_of(self, attempt: int, since: float = 0.0) -> int:
        """How many steps this attempt has made since a time."""
        steps = {made.step for made in self.made if made.attempt == attempt and made.at > since}
        return len(steps)

    def reached(self) -> int:
        """How many steps are made, the repeated ones counted once."""
        return 1 + max((made.step for made in self.made), default=-1)

    def longest_gap(self, start: float, end: float) -> float:
        """The longest time without a finished step within these times."""
        times = sorted(made.at for made in self.made if start <= made.at <= end)
        times = [start, *times, end]
        return max(b - a for a, b in pairwise(times))

    def step_s(self) -> float:
        """The usual time between two finished steps of an attempt."""
        last: dict[tuple[int, int], float] = {}
        gaps = []
        for made in sorted(self.made, key=lambda made: made.at):
            key = (made.attempt, made.rank)
            if key in last:
                gaps.append(made.at - last[key])
            last[key] = made.at
        return statistics.median(gaps) if gaps else 0.0

    def farthest(self, reference: dict[int, float]) -> float:
        """The largest difference of a loss from that of the undisturbed run."""
        return max((abs(made.loss - reference[made.step]) for made in self.made), default=0.0)
