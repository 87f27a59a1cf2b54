"""``profile``: a table of where the time of a step goes, by unit, and a trace.

It reads ranges from torch's profiler: those of the engine (`compat.recorded`), and torch's own
range of an optimizer's step. The time of a range is counted without the ranges inside of it::

    forward(root)  |  embedding  [forward(blocks.0) [wait_for_unshard(blocks.1)] ...]  head  |
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.profiler
from torch import nn

from vescale_fsdp import devices
from vescale_fsdp.engine.unit import units_in

_RANGE = re.compile(r"vescale::(\w+)\((.*?)(?: to .*)?\)")
_OPTIMIZER = "Optimizer.step#"
_STEP = "vescale::step"  # the end of each
# The columns of the table, and the ranges whose times each one adds up.
_COLUMNS = {
    "compute": ("forward", "backward"),
    "waiting for all-gathers": ("wait_for_unshard",),
    "waiting for reductions": ("wait_for_reduce",),
    "issuing": ("unshard", "reduce"),
}
_MUCH, _VERY_MUCH = 0.1, 0.25  # of a step


class Span(NamedTuple):
    """A range on a thread, in microseconds."""

    name: str
    start: float
    end: float


@dataclass
class Report:
    """Where the time of a step went, in milliseconds; the mean over the profiled steps.

    Attributes:
        step: the time from one call of `profile.step` to the next.
        units: for each unit, the time by column: "compute", "waiting for all-gathers", "waiting for
            reductions" and "issuing" (of all-gathers and reductions). A unit has the name of its
            module; the root is "root".
        optimizer: the time of the optimizer's steps.
        gathers: the time of all-gathers for operators on shards, by parameter: of ``w.T`` or
            ``w @ x`` outside of a forward. Not in the time of the optimizer.
    """

    step: float
    units: dict[str, dict[str, float]] = field(default_factory=dict)
    optimizer: float = 0.0
    gathers: dict[str, float] = field(default_factory=dict)

    def total(self, what: str) -> float:
        """The sum of one column of `units`."""
        return sum(times.get(what, 0.0) for times in self.units.values())

    @property
    def other(self) -> float:
        """The time that is in no column and not in the optimizer, for example for data and loss."""
        named = sum(self.total(what) for what in _COLUMNS) + self.optimizer
        named += sum(self.gathers.values())
        return max(0.0, self.step - named)

    @property
    def advice(self) -> str:
        """One line that says what costs most besides compute, and what may help."""
        if self.step <= 0:
            return "No step was profiled."
        gathers = self.total("waiting for all-gathers") / self.step
        reductions = self.total("waiting for reductions") / self.step
        issuing, optimizer = self.total("issuing") / self.step, self.optimizer / self.step
        share, what = max(
            (gathers, "gathers"),
            (reductions, "reductions"),
            (issuing, "issuing"),
            (optimizer - _MUCH, "optimizer"),
        )
        if share < _MUCH:
            return "Nothing but compute takes more than a tenth of a step."
        if what == "gathers":
            more = ", or gather in 8 bits (gather_codec)" if gathers > _VERY_MUCH else ""
            return (
                f"{gathers:.0%} of a step waits for all-gathers: unshard further ahead "
                "(in_flight), keep units unsharded after forward "
                f"(reshard_after_forward=False){more}."
            )
        if what == "reductions":
            return (
                f"{reductions:.0%} of a step waits for reductions: accumulate more micro-batches "
                "in a step (set_requires_gradient_sync), or reduce in 8 bits (reduce_codec)."
            )
        if what == "issuing":
            return (
                f"{issuing:.0%} of a step issues collectives: make larger units, so that there are "
                "fewer."
            )
        return (
            f"{optimizer:.0%} of a step is the optimizer: use fused=True, or "
            "vescale_fsdp.optim.flatten_ for many small parameters."
        )

    def __str__(self) -> str:
        names = ["unit", *_COLUMNS]
        rows = [
            [unit, *(f"{times.get(what, 0.0):.2f}" for what in _COLUMNS)]
            for unit, times in self.units.items()
        ]
        rows.append(["all units", *(f"{self.total(what):.2f}" for what in _COLUMNS)])
        widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
        lines = [
            "  ".join(
                text.ljust(width) if i == 0 else text.rjust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in (names, *rows)
        ]
        lines.append(
            f"ms a step: {self.step:.2f}, of which optimizer {self.optimizer:.2f}, "
            f"other {self.other:.2f}"
        )
        if self.gathers:
            slowest = sorted(self.gathers, key=self.gathers.__getitem__, reverse=True)
            shown = ", ".join(f"{name} {self.gathers[name]:.2f}" for name in slowest[:5])
            more = f", and {len(slowest) - 5} others" if len(slowest) > 5 else ""
            lines.append(
                f"ms a step of gathers for operators on shards (p.T, p @ x): {shown}{more}"
            )
        return "\n".join([*lines, self.advice])


class profile(AbstractContextManager["profile"]):
    """Profile a few steps: a trace for Perfetto, and a table of where the time went.

    ::

        with vescale_fsdp.profile(model, "trace") as profiler:
            for batch in loader:
                train_step(model, optimizer, batch)
                if profiler.step():
                    break

    After the last step, each rank writes ``rank-N.json`` into the folder, and rank 0 prints its
    `report`. Open the files in https://ui.perfetto.dev or ``chrome://tracing``. Other profilers
    show the same ranges, for example ``vescale::unshard(blocks.3)`` and
    ``vescale::wait_for_unshard(blocks.3)``. For Nsight use ``torch.autograd.profiler.emit_nvtx``.
    Without a profiler the ranges cost nothing.

    Args:
        model: a sharded model.
        folder: the folder for the traces. It is created if it does not exist. None: no traces.
        steps: how many steps to profile.
        warmup: how many steps to run before, without the profiler.

    The table shows the time of the host. On a CPU that is where a step's time goes. On CUDA the
    host only queues work, so look at the streams in the trace.

    Cost: torch's profiler slows a step down, more with many small operators.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path | None = None,
        *,
        steps: int = 3,
        warmup: int = 1,
    ) -> None:
        if steps < 1 or warmup < 0:
            raise ValueError(
                f"steps must be at least 1 and warmup at least 0, got {steps} and {warmup}"
            )
        self._names = [name or "root" for name in units_in(model)]
        self._folder = None if folder is None else Path(folder)
        self._steps, self._warmup = steps, warmup
        self._num_steps = 0
        self._profiler: Any = None
        self._started = self._ended = 0.0  # of the steps that are profiled
        self.report: Report | None = None  # after the last step

    def __enter__(self) -> profile:
        if self._warmup == 0:
            self._start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if self._profiler is not None:  # the loop ended after fewer steps than `steps`
            with nullcontext() if error is None else suppress(OSError):  # the error is the user's
                self._stop()

    def step(self) -> bool:
        """Call it after each step. Returns whether all steps have been profiled."""
        self._num_steps += 1
        if self._profiler is not None:
            self._ended = time.perf_counter()
            with torch.profiler.record_function(_STEP):
                pass
        if self._num_steps == self._warmup:
            self._start()
        elif self._num_steps == self._warmup + self._steps:
            self._stop()
        return self._num_steps >= self._warmup + self._steps

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if devices.accelerator_type() == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()  # raises if another one runs
        self._profiler = profiler
        self._started = time.perf_counter()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        rank = dist.get_rank() if dist.is_initialized() else 0
        events = [each for each in profiler.events() if each.device_type.name == "CPU"]
        steps = [each.time_range.start for each in events if each.name == _STEP]
        if steps:  # without what ran after the last of them
            seconds = self._ended - self._started
            threads: dict[int, list[Span]] = defaultdict(list)
            for event in events:
                is_ours = _RANGE.fullmatch(event.name) or event.name.startswith(_OPTIMIZER)
                if is_ours and event.time_range.start < steps[-1]:
                    span = Span(event.name, event.time_range.start, event.time_range.end)
                    threads[event.thread].append(span)
            self.report = report_of(threads.values(), self._names, seconds * 1e3, len(steps))
            if rank == 0:
                sys.stdout.write(f"{self.report}\n")
                sys.stdout.flush()
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"rank-{rank}.json"))


def report_of(
    threads: Iterable[Sequence[Span]], names: Sequence[str], total_ms: float, num_steps: int
) -> Report:
    """Make a report of ranges.

    Args:
        threads: the ranges of each thread, properly nested.
        names: the names of the units, in the order of the table.
        total_ms: the time of all steps.
        num_steps: the number of steps.
    """
    report = Report(total_ms / num_steps, {name: {} for name in names})
    column_of = {kind: column for column, kinds in _COLUMNS.items() for kind in kinds}
    for spans in threads:
        for name, own_us in own_times(spans):
            own_ms = own_us / 1e3 / num_steps
            found = _RANGE.fullmatch(name)
            if found is None:
                report.optimizer += own_ms
                continue
            kind, unit = found.groups()
            if kind == "gather":
                report.gathers[unit] = report.gathers.get(unit, 0.0) + own_ms
                continue
            times = report.units.setdefault(unit, {})
            times[column_of[kind]] = times.get(column_of[kind], 0.0) + own_ms
    return report


def own_times(spans: Sequence[Span]) -> list[tuple[str, float]]:
    """The name of each range, and its time without the ranges inside of it, in microseconds."""
    found: list[tuple[str, float]] = []
    around: list[list[Any]] = []  # [span, time of the ranges inside]

    def close() -> None:
        span, inside = around.pop()
        length = span.end - span.start
        found.append((span.name, max(0.0, length - inside)))
        if around:
            around[-1][1] += length

    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        while around and around[-1][0].end <= span.start:
            close()
        around.append([span, 0.0])
    while around:
        close()
    return found
