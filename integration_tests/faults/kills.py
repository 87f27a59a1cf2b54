"""kill -9: at each point of a save, at random times, in a load, in a save in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from vescale_fsdp import checkpoint
from vescale_fsdp.checkpoint import files

from .engines import (
    FOLDERS,
    OURS,
    STOCK,
    digest,
    load,
    local_digest,
    make,
    newest,
    save,
    stock_state,
    train,
)
from .harness import (
    End,
    Killer,
    Scenario,
    Trial,
    die,
    killed_at,
    numbered,
    observe,
    ready,
    steady,
    survivors_of,
    was_killed,
    write_whole,
)

KEPT, MIXED, LOST = "kept", "a mix of steps", "lost"
NUM_STEPS = 80  # more than the slowest kill waits for
ARMED_AT = 3


@functools.cache
def history(engine: str) -> list[str]:
    """The digest after each step of an undisturbed run."""
    return run_undisturbed_on_ranks(engine)


def run_undisturbed_on_ranks(engine: str) -> list[str]:
    (end,) = observe(run_undisturbed, 1, engine)
    assert end.how == "returned", end
    found: list[str] = end.value
    return found


def run_undisturbed(engine: str) -> list[str]:
    model, optimizer = make(engine)
    found = [""]
    for step in range(1, NUM_STEPS + 1):
        train(model, optimizer, step)
        found.append(digest(model, optimizer))
    return found


# The loop that is killed


def save_loop(
    engine: str, folder: Path, arm: Callable[[], None] | None, victim: int, background: bool = False
) -> None:
    """Train and save. ``arm`` is called on the victim before the third save."""
    rank, root = dist.get_rank(), folder / "runs"
    model, optimizer = make(engine)
    saver = Saver(engine, root, model, optimizer) if background else None
    try:
        for step in range(1, NUM_STEPS + 1):
            train(model, optimizer, step)
            if step == ARMED_AT and arm is None:
                ready(folder)
            if step == ARMED_AT and arm is not None and rank == victim:
                arm()
            say(folder, rank, f"begin {step}")
            if saver is None:
                save(engine, root, step, model, optimizer)
                say(folder, rank, f"saved {step}")
            else:
                saver.finish()
                say(folder, rank, f"saved {step - 1}")
                saver.begin(step)
            if step == ARMED_AT and arm is not None and rank == victim:
                die(folder)
    finally:
        if saver is not None:  # its thread must end too
            saver.finish()


class Saver:
    """Saves in the background, one after the other."""

    def __init__(self, engine: str, root: Path, model: nn.Module, optimizer: Any) -> None:
        self._engine, self._root = engine, root
        self._model, self._optimizer = model, optimizer
        self._finish: Callable[[], Any] = lambda: None
        self._group = dist.new_group(backend="gloo") if engine == STOCK else None

    def begin(self, step: int) -> None:
        if self._engine == OURS:
            path, extra = self._root / f"step-{step}", {"step": step}
            handle = checkpoint.save(
                path, self._model, self._optimizer, extra=extra, keep_last=2, async_=True
            )
            self._finish = handle.wait
            return
        state = stock_state(self._model, self._optimizer) | {"step": step}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = dcp.async_save(
                state, checkpoint_id=self._root / "checkpoint", process_group=self._group
            )
        self._finish = future.result

    def finish(self) -> None:
        finish, self._finish = self._finish, lambda: None
        finish()


def say(folder: Path, rank: int, line: str) -> None:
    with open(folder / f"{rank}.log", "a") as stream:
        stream.write(f"{line}\n")


def last_words(folder: Path, rank: int) -> str:
    path = folder / f"{rank}.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return lines[-1] if lines else "start"


def acknowledged(folder: Path) -> int:
    """The last step whose save has returned on any rank."""
    lines = [line for log in folder.glob("*.log") for line in log.read_text().splitlines()]
    return max(int(line[6:]) for line in lines if line.startswith("saved "))


def examine(engine: str, root: Path, saves: bool = True) -> tuple[int, str, list[str]]:
    """Load what is there; its step and digest, and what else lies there after one more save."""
    model, optimizer = make(engine, seed=1)
    step = load(engine, newest(engine, root), model, optimizer)
    found = digest(model, optimizer)
    if saves:
        save(engine, root, NUM_STEPS + 1, model, optimizer)
    names = sorted(path.name for path in root.iterdir())
    return step, found, [name for name in names if "tmp" in name or name.startswith(".")]


def judged(engine: str, folder: Path, end: End, ends: list[End], victim: int) -> Trial:
    """What the crash has left."""
    acked = acknowledged(folder)
    where = f"rank {victim} after '{last_words(folder, victim)}'"
    if end.how != "returned":
        outcome, detail = LOST, f"{where}: {end.kind}: {end.message[-200:]}"
    else:
        step, found, rest = end.value
        if history(engine)[step] != found:
            outcome, detail = MIXED, f"{where}: says step {step}, and is not"
        elif step < acked:
            outcome, detail = LOST, f"{where}: loads step {step}, {acked} was saved"
        elif rest and engine == OURS:
            outcome, detail = "leaves files", f"{where}: {rest}"
        else:
            outcome, detail = KEPT, f"{where}: loads step {step}, {acked} was saved"
    evidence = was_killed(ends[victim])
    return Trial(outcome, evidence, detail=detail, **survivors_of(ends, victim, killed_at(folder)))


# At each point


@dataclass(frozen=True)
class Point:
    """A place in a save at which a rank dies.

    ``event`` is one of Python's audit events: the rank dies before the first of these with a path
    that the pattern matches. "open" means to write, "open folder" to flush a folder, and "half" the
    middle of a data file.
    """

    name: str
    victim: int
    event: str = ""
    path: str = ""


POINTS: dict[str, list[Point]] = {
    OURS: [
        Point("before the stage", 0, "os.mkdir", r"/\.step-3\.new-"),
        Point("before the stage has its name", 0, "os.rename", r"/step-3\.tmp-"),
        Point("before its file", 0, "open", "rank-00000"),
        Point("before its file", 1, "open", "rank-00001"),
        Point("in the middle of its file", 0, "half", "rank-00000"),
        Point("in the middle of its file", 1, "half", "rank-00001"),
        Point("before the manifest", 0, "open", "manifest"),
        Point("before the rename", 0, "os.rename", "/step-3$"),
        Point("after the rename", 0, "open folder", "/runs$"),
        Point("while it deletes old ones", 0, "os.remove", r"/step-1\.tmp-.*/manifest"),
        Point("while it deletes old ones", 0, "os.rmdir", r"/step-1\.tmp-"),
        Point("after the save", 0),
        Point("after the save", 1),
    ],
    STOCK: [
        Point("before its file", 0, "open", "__0_0"),
        Point("before its file", 1, "open", "__1_0"),
        Point("in the middle of its file", 0, "half", "__0_0"),
        Point("in the middle of its file", 1, "half", "__1_0"),
        Point("before the metadata", 0, "open", r"\.metadata\.tmp"),
        Point("before the rename", 0, "os.rename", r"\.metadata$"),
        Point("after the save", 0),
        Point("after the save", 1),
    ],
}


def arm(point: Point, folder: Path) -> None:
    """Make this process die at a point of what it does next."""
    if point.event == "half":
        break_writing(point, folder)
    elif point.event:

        def hook(event: str, args: tuple[Any, ...]) -> None:
            paths = [os.fspath(arg) for arg in args if isinstance(arg, str | Path)]
            if event == "open":
                event = "open folder" if args[1] is None else f"open to {args[1]}"
                event = "open" if event[8:9] in ("w", "x") else event
            if event == point.event and any(re.search(point.path, path) for path in paths):
                die(folder)

        sys.addaudithook(hook)


def break_writing(point: Point, folder: Path) -> None:
    """Die when half of a data file has been written."""

    class Dying:
        def __init__(self, stream: Any) -> None:
            self._stream, self._room = stream, 100_000  # of about 600,000 bytes

        def write(self, data: Any) -> Any:
            view = memoryview(data).cast("B")
            if len(view) > self._room:
                self._stream.write(view[: self._room])
                self._stream.flush()
                die(folder)
            self._room -= len(view)
            return self._stream.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    def opened(path: Any, *args: Any, **options: Any) -> Any:
        stream = open(path, *args, **options)  # noqa: SIM115
        return Dying(stream) if re.search(point.path, str(path)) else stream

    @contextlib.contextmanager
    def created(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with open(path, mode) as stream:
            yield Dying(stream) if re.search(point.path, str(path)) else stream

    files.open = opened  # type: ignore[attr-defined]
    FileSystem.create_stream = created  # type: ignore[method-assign]


def at_each_point(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    points = POINTS[engine]
    for number, place in numbered(folder, max(num_trials, 1) * len(points)):
        point = points[number % len(points)]
        size = 2 if number < len(points) else 4

        def trial(place: Path, point: Point = point, size: int = size) -> Trial:
            armed = functools.partial(arm, point, place)
            ends = observe(save_loop, size, engine, place, armed, point.victim)
            (end,) = observe(examine, 1, engine, place / "runs")
            found = judged(engine, place, end, ends, point.victim)
            reached = last_words(place, point.victim) in ("begin 3", "saved 3")
            if not reached:
                return Trial("", "", detail=f"{point}: {ends}")
            return with_detail(found, f"{point.name}, {found.detail}")

        yield steady(trial, place)


def with_detail(trial: Trial, detail: str) -> Trial:
    return dataclasses.replace(trial, detail=detail)


# At random times


def at_random_times(
    engine: str, num_trials: int, folder: Path, background: bool = False
) -> Iterator[Trial]:
    chance = random.Random(7)
    for number, place in numbered(folder, num_trials):
        size = 4 if number % 4 == 3 else 2
        victim, delay_s = chance.randrange(size), chance.uniform(0, 0.6)

        def trial(place: Path, size: int = size, victim: int = victim, s: float = delay_s) -> Trial:
            with Killer(place, size, victim, s):
                ends = observe(save_loop, size, engine, place, None, victim, background)
            (end,) = observe(examine, 1, engine, place / "runs")
            return judged(engine, place, end, ends, victim)

        yield steady(trial, place)


def in_the_background(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    return at_random_times(engine, num_trials, folder, background=True)


# In a load

UNCHANGED, CHANGED = "survivors' models unchanged", "a survivor's model changed"


def save_two(engine: str, root: Path) -> None:
    model, optimizer = make(engine)
    for step in (1, 2):
        train(model, optimizer, step)
        save(engine, root / str(step), step, model, optimizer)


def load_loop(engine: str, folder: Path, root: Path) -> None:
    """Load two checkpoints in turns. A rank that is left says whether its model has changed."""
    model, optimizer = make(engine, seed=1)
    paths = [newest(engine, root / step) for step in ("1", "2")]
    load(engine, paths[1], model, optimizer)
    ready(folder)
    for number in range(200):
        before = local_digest(model, optimizer)
        say(folder, dist.get_rank(), f"begin {number}")
        try:
            load(engine, paths[number % 2], model, optimizer)
        except BaseException:  # DCP's is no Exception
            text = UNCHANGED if local_digest(model, optimizer) == before else CHANGED
            write_whole(folder / f"{dist.get_rank()}.model", text.encode())
            raise


def in_a_load(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    chance, root = random.Random(11), folder / "saved"
    ends = observe(save_two, 2, engine, root)
    assert all(end.how == "returned" for end in ends), ends
    for number, place in numbered(folder, num_trials):
        size = 4 if number % 4 == 3 else 2
        victim, delay_s = chance.randrange(size), chance.uniform(0, 0.3)

        def trial(place: Path, size: int = size, victim: int = victim, s: float = delay_s) -> Trial:
            with Killer(place, size, victim, s):
                ends = observe(load_loop, size, engine, place, root)
            (end,) = observe(examine, 1, engine, root / "2", False)
            models = {file.read_text() for file in place.glob("*.model")}
            if end.how != "returned":
                outcome = LOST
            else:
                outcome = CHANGED if CHANGED in models else UNCHANGED
            detail = f"rank {victim} after '{last_words(place, victim)}'"
            evidence = was_killed(ends[victim])
            left = survivors_of(ends, victim, killed_at(place))
            return Trial(outcome, evidence, detail=detail, **left)

        yield steady(trial, place)


GROUP = "kill -9"
RANDOM = "a random rank, at a random time of a loop of"
SCENARIOS = [
    Scenario(GROUP, "one rank, at each point of a save", at_each_point, frozenset({KEPT}), 1, 2),
    Scenario(
        GROUP,
        f"{RANDOM} saves",
        at_random_times,
        frozenset({KEPT}),
        short=4,
        full=100,
        stock=40,
        engines=(OURS, STOCK, FOLDERS),
    ),
    Scenario(
        GROUP,
        f"{RANDOM} saves in the background",
        in_the_background,
        frozenset({KEPT}),
        short=2,
        full=30,
        stock=20,
    ),
    Scenario(
        GROUP,
        f"{RANDOM} loads",
        in_a_load,
        frozenset({UNCHANGED}),
        short=2,
        full=30,
        stock=20,
    ),
]
