"""Team: the processes of one engine, one per rank. They run some steps when they are told to.

Each engine has separate processes, so that allocations and patches of one do not affect another.
They are forked from a server that has loaded torch, so that they start quickly. First they enter
their network namespace.
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
    """The results of some steps of a team, or of one rank of it.

    Attributes:
        step_s: the median over the steps, the mean over the ranks.
        cpu_s: CPU time of a process per step, all threads.
        peak_bytes: the peak of the resident size since the first steps, minus the size before the
            model was made; the largest of the ranks.
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
        places: the namespaces to run in. None: the current one.
        module: the module that has ``make_engine``.
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
            theirs.close()  # so that the pipe closes when the process ends
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
        """Wait until the engine is ready. Returns the bytes that a rank should send in a step.

        Raises:
            RuntimeError: a rank has failed, here or in any other method.
        """
        expected: list[float] = self._answers()
        return expected[0]

    def trace(self, steps: int) -> list[Trace]:
        """Run one step, and then trace ``steps`` steps. Returns the trace of each rank."""
        return self._ask("trace", steps)

    def inspect(self) -> list[Inspection]:
        """Make the engine again, and count memory and copies. Returns the counts of each rank."""
        return self._ask("inspect", 0)

    def run(self, steps: int) -> Turn:
        """Run one step that is not timed, and then ``steps`` timed ones."""
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
    """The message of a rank that has raised an exception."""

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
    """Run as a rank until it is killed."""
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
    """Call the methods that the connection names, forever."""
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
    for index in range(steps + 1):  # the first is not timed: the caches have data of another engine
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
