"""Faults as data: run one on real processes, see that it happened, and count what came of it.

A `Scenario` is a row of the table. It yields a `Trial` for each fault: what came of it, the
evidence that the fault has happened, and how the ranks that were left have ended. A trial without
evidence counts as invalid, and a scenario with one has failed.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vescale_fsdp import VeScaleError
from vescale_fsdp.testing import RankError, run_ranks

LIMIT_S = 5.0  # for ranks that are left to end in a Python exception
STALL_S = 1.0  # a machine that stood still for longer has spoiled what was timed


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    rank: int
    how: str  # "returned", "raised", "died", "hung"
    kind: str = ""  # of the exception; the exit status
    message: str = ""
    is_ours: bool = False  # a VeScaleError
    at: float = 0.0  # time.monotonic(), which all processes of a machine share
    value: Any = None


@dataclass(frozen=True)
class Trial:
    """One fault and what came of it."""

    outcome: str
    evidence: str  # that the fault has happened; empty if it has not
    survivors: tuple[str, ...] = ()  # "raised", "hung", "died"
    seconds: float | None = None  # from the fault until the last survivor raised
    detail: str = ""
    stuck: str = ""  # where a survivor hung


@dataclass(frozen=True)
class Scenario:
    """A row of the table.

    Attributes:
        group: the section of the table.
        name: of the fault.
        run: ``(engine, number of trials, empty folder)`` yields trials. Those that go through a
            list of their own do all of it for 0.
        good: the outcomes that meet the bar.
        short, full: numbers of trials with ours; None is not in the short form.
        stock: in the full form with others; as many as with ours if it is not given.
        engines: for which it makes sense.
        missed: why ours does not meet the bar, where that is known. Then it must not.
    """

    group: str
    name: str
    run: Callable[[str, int, Path], Iterable[Trial]]
    good: frozenset[str]
    short: int | None
    full: int
    stock: int | None = None
    engines: tuple[str, ...] = ("ours", "stock")
    missed: str = ""

    def num_trials(self, engine: str, *, is_full: bool) -> int:
        """How many trials to run."""
        if not is_full:
            return self.short or 0
        return self.full if engine == "ours" or self.stock is None else self.stock


@dataclass
class Result:
    """The trials of a scenario with one engine, counted."""

    engine: str
    outcomes: Counter[str] = field(default_factory=Counter)
    survivors: Counter[str] = field(default_factory=Counter)
    slowest: float | None = None
    num_invalid: int = 0
    seconds: float = 0.0
    examples: dict[str, str] = field(default_factory=dict)  # by outcome
    skipped: str = ""

    @property
    def num_trials(self) -> int:
        return self.outcomes.total()

    def faults(self, good: frozenset[str]) -> list[str]:
        """In what the bar is missed; empty if it is met."""
        found = [
            f"{count} x {outcome}: {self.examples.get(outcome, '')}"
            for outcome, count in self.outcomes.items()
            if outcome not in good
        ]
        found += [
            f"{count} survivors {how}: {self.examples.get(how, '')}"
            for how, count in self.survivors.items()
            if how != "raised"
        ]
        if self.slowest is not None and self.slowest > LIMIT_S:
            found.append(f"a survivor took {self.slowest:.1f} s")
        if self.num_invalid:
            found.append(f"{self.num_invalid} trials in which the fault did not happen")
        if not self.num_trials and not self.skipped:
            found.append("there was no trial")
        return found


class Skipped(Exception):
    """The machine does not let a fault be made; says why."""


def run(scenario: Scenario, engine: str, num_trials: int, folder: Path) -> Result:
    """Run the trials and count."""
    result = Result(engine)
    start = time.monotonic()
    try:
        for trial in scenario.run(engine, num_trials, folder):
            if not trial.evidence:
                result.num_invalid += 1
                result.examples.setdefault("invalid", trial.detail)
                continue
            result.outcomes[trial.outcome] += 1
            result.survivors.update(trial.survivors)
            result.examples.setdefault(trial.outcome, trial.detail or trial.evidence)
            if trial.stuck:
                result.examples.setdefault("hung", trial.stuck)
            if trial.seconds is not None:
                result.slowest = max(result.slowest or 0.0, trial.seconds)
    except Skipped as reason:
        result.skipped = str(reason)
    result.seconds = time.monotonic() - start
    return result


# Ranks


def observe(
    fn: Callable[..., Any], world_size: int, *args: object, timeout_s: float = 30
) -> list[End]:
    """Run ``fn(*args)`` on ranks, of which any may raise, die or hang, and say how each ended.

    The process of a rank that raises ends, as it does in a job that does not catch it. When one
    has ended so or has died, the others have `LIMIT_S` to end.
    """
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        died: dict[int, End] = {}
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # what ranks print while they fail
                run_ranks(_observed, world_size, folder, fn, args, timeout_s=timeout_s)
        except RankError as error:
            for each in error.failures:
                code = re.search(r"exit code (-?\d+)", each.message)
                how = {"RankDied": "died", "RankHung": "hung"}.get(each.type_name, "raised")
                kind = code[1] if code else each.type_name
                died[each.rank] = End(each.rank, how, kind, each.traceback, at=time.monotonic())
        ends = []
        for rank in range(world_size):
            file = folder / f"{rank}.end"
            if file.exists():  # what it said before it died on its way out
                ends.append(pickle.loads(file.read_bytes()))
            else:
                ends.append(died.get(rank) or End(rank, "hung"))
        return ends


def _observed(folder: Path, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    rank = dist.get_rank()
    try:
        value = fn(*args)
        end = End(rank, "returned", at=time.monotonic(), value=value)
    except BaseException as error:  # noqa: BLE001  it is observed; DCP's is no Exception
        kind, ours = type(error).__name__, isinstance(error, VeScaleError)
        end = End(rank, "raised", kind, str(error), ours, time.monotonic())
    write_whole(folder / f"{rank}.end", pickle.dumps(end))
    if end.how == "raised":
        os._exit(1)


def write_whole(path: Path, data: bytes) -> None:
    """So that a reader sees all of it or no file."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.rename(path)


def survivors_of(ends: list[End], victim: int, killed_at: float) -> dict[str, Any]:
    """``survivors``, ``seconds`` and ``stuck`` of a `Trial` in which one rank was killed."""
    others = [end for end in ends if end.rank != victim]
    raised = [end.at - killed_at for end in others if end.how == "raised"]
    return {
        "survivors": tuple(end.how for end in others),
        "seconds": max(raised, default=None),
        "stuck": next((end.message for end in others if end.how == "hung"), ""),
    }


def was_killed(end: End) -> str:
    """Evidence that a rank has died of SIGKILL."""
    return f"rank {end.rank} ended with status -9" if (end.how, end.kind) == ("died", "-9") else ""


# Killing


def die(folder: Path) -> None:
    """End this process by SIGKILL, after the time was noted."""
    write_whole(folder / "killed", repr(time.monotonic()).encode())
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(folder: Path) -> float:
    """When `die` or `Killer` has struck; 0 if it has not."""
    path = folder / "killed"
    return float(path.read_bytes()) if path.exists() else 0.0


def ready(folder: Path) -> None:
    """Tell the `Killer` that this rank may be killed from now on, and go on when all have."""
    write_whole(folder / f"{dist.get_rank()}.pid", str(os.getpid()).encode())
    while not (folder / "go").exists():
        time.sleep(0.001)


class Killer(threading.Thread):
    """Kills a rank some seconds after all ranks are `ready`. A context around `observe`."""

    def __init__(self, folder: Path, world_size: int, victim: int, delay_s: float) -> None:
        super().__init__(daemon=True)
        self._folder, self._size = folder, world_size
        self._victim, self._delay_s = victim, delay_s
        self._is_over = threading.Event()

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        """Wait, and kill; never after the context has ended, when the number may be another's."""
        files = [self._folder / f"{rank}.pid" for rank in range(self._size)]
        while not all(file.exists() for file in files):
            if self._is_over.wait(0.002):
                return
        pid = int(files[self._victim].read_bytes())
        write_whole(self._folder / "go", b"")
        if self._is_over.wait(self._delay_s):
            return
        write_whole(self._folder / "killed", repr(time.monotonic()).encode())
        os.kill(pid, signal.SIGKILL)


# Time


class Stalls(threading.Thread):
    """Notices when the whole machine stands still, which some do now and then."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest = 0.0
        self._is_over = threading.Event()

    def __enter__(self) -> Stalls:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        """Sleep a little, and see how long it took."""
        last = time.monotonic()
        while not self._is_over.wait(0.02):
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now


def steady(trial: Callable[[Path], Trial], folder: Path) -> Trial:
    """A trial in a folder of its own; again while the machine stood still and spoiled its times."""
    for attempt in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with Stalls() as stalls:
            found = trial(folder)
        shutil.rmtree(folder, ignore_errors=True)
        is_late = found.seconds is not None and found.seconds > LIMIT_S
        is_late |= "hung" in found.survivors or "hangs" in found.outcome
        if stalls.longest < STALL_S or not is_late:
            break
        print(f"the machine stood still for {stalls.longest:.1f} s in trial {attempt + 1}")
    return found


def numbered(folder: Path, count: int) -> Iterator[tuple[int, Path]]:
    """Folders for trials."""
    for number in range(count):
        yield number, folder / f"trial-{number}"
