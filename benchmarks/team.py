"""Team: the processes of one engine, one a rank, which wait for their turn and then run some steps.

Processes of their own keep what engines allocate and patch apart. They are forked from a server
that has torch loaded, so that many of them start quickly, and enter their network first of all.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.slow_network import Place, die_with_parent

if TYPE_CHECKING:
    from benchmarks.engines import Engine, Training
    from benchmarks.inspection import Inspection
    from benchmarks.tracing import Trace

__all__ = ["Team", "Turn"]

_STARTS = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Turn:
    """What a team, or one rank of it, did in one turn.

    Attributes:
        step_s: the median over the steps, the mean over the ranks.
        cpu_s: of a process per step, all threads.
        peak_bytes: by how much the resident size was above that before the model was made, at
            most, since the first steps; the largest of the ranks.
        losses: of each step, mean over the ranks.
    """

    step_s: float
    cpu_s: float
    peak_bytes: int
    losses: list[float]


class Team:
    """The ranks of one engine.

    Args:
        engine: one of `engines.ENGINES`.
        model: one of `models.PRESETS`.
        precision: "fp32" or "bf16".
        num_ranks: processes.
        places: where they run; None: here.
        module: that has ``make_engine``.
    """

    def __init__(
        self,
        engine: str,
        model: str,
        precision: str,
        num_ranks: int,
        places: list[Place] | None,
        module: str = "benchmarks.engines",
    ) -> None:
        self.engine = engine
        self._folder = tempfile.TemporaryDirectory()
        self._ends: list[Connection[Any, Any]] = []
        self._processes: list[BaseProcess] = []
        _STARTS.set_forkserver_preload([module])
        for rank in range(num_ranks):
            mine, theirs = _STARTS.Pipe()
            place = places[rank] if places else None
            rendezvous = f"{self._folder.name}/rendezvous"
            call = (theirs, module, engine, model, precision, rank, num_ranks, place, rendezvous)
            process = _STARTS.Process(target=_rank, args=call, daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._ends.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def start(self) -> float:
        """Wait until the engine is ready; the bytes that a rank is expected to send in a step.

        Raises:
            RuntimeError: a rank has failed, here or in any other method.
        """
        expected: list[float] = self._answers()
        return expected[0]

    def trace(self, steps: int) -> list[Trace]:
        """Run one step, and then ``steps`` that are traced; what each rank saw."""
        return self._ask("trace", steps)

    def inspect(self) -> list[Inspection]:
        """Make the engine anew, and count its memory and its copies; what each rank found."""
        return self._ask("inspect", 0)

    def run(self, steps: int) -> Turn:
        """Run one step that is not timed, and then ``steps`` that are."""
        turns: list[Turn] = self._ask("run", steps)
        return Turn(
            statistics.mean(turn.step_s for turn in turns),
            statistics.mean(turn.cpu_s for turn in turns),
            max(turn.peak_bytes for turn in turns),
            [statistics.mean(each) for each in zip(*(turn.losses for turn in turns), strict=True)],
        )

    def _ask(self, command: str, steps: int) -> list[Any]:
        for end in self._ends:
            with suppress(BrokenPipeError):  # who has died says nothing either
                end.send((command, steps))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, end in enumerate(self._ends):
            try:
                answers.append(end.recv())
            except (EOFError, ConnectionError):
                raise RuntimeError(f"{self.engine}: rank {rank} has died") from None
            if isinstance(answers[-1], Failure):
                raise RuntimeError(f"{self.engine}: rank {rank}: {answers[-1].text}")
        return answers


@dataclass(frozen=True)
class Failure:
    """What a rank says that has met an exception."""

    text: str


def _rank(
    connection: Connection[Any, Any],
    module: str,
    engine: str,
    model: str,
    precision: str,
    rank: int,
    num_ranks: int,
    place: Place | None,
    rendezvous: str,
) -> None:
    """A rank, until it is killed."""
    die_with_parent()
    if place is not None:
        place.enter()
    try:
        import torch
        import torch.distributed as dist
        from benchmarks.models import PRESETS

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(minutes=10),
        )
        if engine.startswith("deepspeed"):
            import_module("deepspeed")  # its code is no memory of the model
        make_engine = import_module(module).make_engine
        _serve(connection, partial(make_engine, engine, PRESETS[model], precision, rank, num_ranks))
    except Exception as error:  # told to the one who waits
        connection.send(Failure(f"{type(error).__name__}: {error}"))
        raise


def _serve(connection: Connection[Any, Any], make: Callable[[], Engine]) -> None:
    """Do what the connection asks for, for ever."""
    import torch.distributed as dist
    from benchmarks.engines import Training

    before = _resident("VmRSS")
    trained: Engine | None = make()
    assert trained is not None
    gc.collect()
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    connection.send(trained.expected_bytes)
    while True:  # until it is killed
        command, steps = connection.recv()
        dist.barrier()
        if command == "inspect":
            from benchmarks.inspection import inspect

            trained = None
            gc.collect()
            trained, found = inspect(make)
            connection.send(found)
        elif command == "trace":
            assert isinstance(trained, Training), "the parts alone have no parts"
            connection.send(_trace(trained, steps))
        else:
            connection.send(_run(trained, steps, before))


def _run(engine: Engine, steps: int, resident_before: int) -> Turn:
    seconds, losses, cpu = [], [], 0.0
    for index in range(steps + 1):  # the caches hold another engine's data at first
        if index == 1:
            cpu = time.process_time()
        started = time.perf_counter()
        losses.append(engine.step())
        seconds.append(time.perf_counter() - started)
    cpu = (time.process_time() - cpu) / steps
    peak = _resident("VmHWM") - resident_before
    return Turn(statistics.median(seconds[1:]), cpu, peak, losses)


def _trace(engine: Training, steps: int) -> Trace:
    from benchmarks.tracing import traced

    engine.step()
    with traced() as trace:
        engine.mark = trace.mark
        for _ in range(steps):
            engine.step()
    engine.mark = lambda name: None
    time.sleep(0.1)  # until the threads of gloo have told of the last one
    return trace


def _resident(which: str) -> int:
    """Bytes of this process in memory: ``VmRSS`` now, ``VmHWM`` at most."""
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(which))
