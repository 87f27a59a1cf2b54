"""Simulates the time of a step, from sizes and rates, with a queue for compute and one for network.

The engine's scheduler (`vescale_fsdp.program`) runs the step on units that only take time::

    compute  | forward 1 | 2 | .. | the root, both ways | backward n | .. | backward 1 |
    network  | gathers 0, 1 | 2 | 3 ..    | gather n | n - 1, reduce n | .. | reduce 0

The network runs one collective at a time, in the order of issue. Without overlap (FSDP2 on CPU)
compute waits for each collective.

It does not include recomputation of activations, other traffic, stragglers, and communication of
the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vescale_fsdp.program import Executor, Names, Passes, Record, Reduction, Residency, policy_of
from vescale_fsdp_tune.costs.machine import Link


@dataclass(frozen=True)
class UnitCost:
    """One unit in one step of one rank.

    Attributes:
        forward_s, backward_s: of compute alone.
        gather_bytes, reduce_bytes: that a rank sends in one gather and one reduction.
        copy_out_s: copies from the all-gather's output to parameters, before each use.
        copy_in_s: copies from gradients to the reduce-scatter's input.
    """

    forward_s: float
    backward_s: float
    gather_bytes: float
    reduce_bytes: float
    copy_out_s: float = 0.0
    copy_in_s: float = 0.0


class Span(NamedTuple):
    """An activity of processor or network, in seconds since the start of the step."""

    track: str  # "compute" or "network"
    name: str
    start_s: float
    seconds: float


@dataclass(frozen=True)
class Step:
    """The times of a step.

    Attributes:
        step_s: all of it.
        compute_s: forward, backward and optimizer.
        copy_s: of copies.
        network_s: that the network is busy.
        spans: of both, in the order of their start on each track.
    """

    step_s: float
    compute_s: float
    copy_s: float
    network_s: float
    spans: Sequence[Span] = field(default=(), compare=False)

    @property
    def exposed_s(self) -> float:
        """Seconds of waiting, without compute and copies."""
        return self.step_s - self.compute_s - self.copy_s


class _Clock:
    """The current time of compute, and the time at which the network is free."""

    def __init__(self, link: Link, *, overlaps: bool) -> None:
        self._link, self._overlaps = link, overlaps
        self.now = self._free = 0.0
        self.spans: list[Span] = []

    def issue(self, name: str, num_bytes: float) -> float:
        """Start a collective. Returns the time of its end."""
        seconds, start = self._link.seconds(num_bytes), max(self.now, self._free)
        if seconds:
            self.spans.append(Span("network", name, start, seconds))
        self._free = start + seconds
        if not self._overlaps:
            self.wait(self._free)
        return self._free

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def compute(self, name: str, seconds: float) -> None:
        if seconds:
            self.spans.append(Span("compute", name, self.now, seconds))
        self.now += seconds


class _Call:
    pass_number = 0


class _Unit(Residency):
    """A unit that takes time."""

    version = 0
    is_stale = has_streams = False
    trainable = all_trainable = True
    sizes = (1, 1)  # two halves of its gradients

    def __init__(self, name: str, cost: UnitCost, clock: _Clock) -> None:
        super().__init__()
        self.name, self.cost, self._clock = name, cost, clock
        self._arrives: float | None = None
        self._is_copied = False

    @property
    def is_sharded(self) -> bool:
        return self._arrives is None

    def start_unshard(self, *, in_backward: bool = False) -> None:
        if self._arrives is None:
            self._arrives = self._clock.issue(f"gather {self.name}", self.cost.gather_bytes)

    def wait_for_unshard(self) -> None:
        if self._arrives is not None and not self._is_copied:
            self._clock.wait(self._arrives)
            self._clock.compute(f"copy {self.name}", self.cost.copy_out_s)
            self._is_copied = True

    def join_unshard(self) -> None: ...

    def park(self) -> None: ...

    def free(self) -> None:
        self._arrives, self._is_copied = None, False

    def free_but_part(self) -> None:
        self.free()


class _Group(Reduction):
    has_gradients = False

    def __init__(self, unit: _Unit, clock: _Clock) -> None:
        self.number, self.unit, self._of, self._clock = unit.index, unit, unit, clock
        self._ends = 0.0

    def start(self) -> None:
        cost = self._of.cost
        self._clock.compute(f"copy gradients {self._of.name}", cost.copy_in_s)
        self._ends = self._clock.issue(f"reduce {self._of.name}", cost.reduce_bytes)

    def has_arrived(self) -> bool:
        return True

    def finish(self) -> None:
        self._clock.wait(self._ends)


class _Model(Executor):
    def __init__(self, costs: Sequence[UnitCost], clock: _Clock, *, alternates: bool) -> None:
        self.units = [_Unit(str(number), each, clock) for number, each in enumerate(costs)]
        self.units[0].is_root = True
        names = ["", *(f"units.{number}" for number in range(1, len(costs)))]
        policy = policy_of(2, [], has_streams=not alternates)
        kinds = ["Unit"] * len(names)
        self.passes = Passes(
            self.units, Names(names, kinds), self, policy, can_settle=True, trusts=True
        )
        self._groups = [_Group(unit, clock) for unit in self.units]

    def settle(self, mine: Record, timeout_s: float | None) -> Record:
        return mine

    def compare(self, entries: Sequence[str], unit: Residency | None) -> None: ...

    def stall(self) -> None: ...

    def due(self) -> Sequence[Reduction]:
        return self._groups[::-1]

    def start_reductions(self, batch: Sequence[Reduction]) -> None:
        for group in batch:
            assert isinstance(group, _Group)
            group.start()


def run_step(
    root: UnitCost,
    units: Sequence[UnitCost],
    link: Link,
    *,
    overlaps: bool = True,
    takes_turns: bool = False,
    optimizer_s: float = 0.0,
) -> Step:
    """Simulate a step. The root's compute comes after the last unit (head and loss)."""
    clock = _Clock(link, overlaps=overlaps)
    model = _Model([root, *units], clock, alternates=takes_turns)
    _forward(model, clock)
    _backward(model, clock)
    clock.compute("optimizer", optimizer_s)
    each = (root, *units)
    compute_s = sum(unit.forward_s + unit.backward_s for unit in each) + optimizer_s
    copy_s = sum(2 * unit.copy_out_s + unit.copy_in_s for unit in units)
    copy_s += root.copy_out_s + root.copy_in_s
    network_s = sum(span.seconds for span in clock.spans if span.track == "network")
    return Step(clock.now, compute_s, copy_s, network_s, tuple(clock.spans))


def _forward(model: _Model, clock: _Clock) -> None:
    passes, (root, *units) = model.passes, model.units
    passes.before_forward(root, "forward", True)
    for unit in units:
        passes.before_forward(unit, "forward", True)
        clock.compute(f"forward {unit.name}", unit.cost.forward_s)
        passes.after_forward(unit)
    clock.compute("forward root", root.cost.forward_s)
    passes.after_forward(root, is_closed=True)


def _backward(model: _Model, clock: _Clock) -> None:
    passes, (root, *units) = model.passes, model.units
    calls = {unit: _Call() for unit in model.units}
    for unit, call in calls.items():
        unit.open_calls.add(call)
    passes.begin_backward()
    root.enter_backward(calls[root])
    passes.before_backward(root)
    clock.compute("backward root", root.cost.backward_s)
    for unit in reversed(units):
        unit.enter_backward(calls[unit])
        passes.before_backward(unit)
        for elements in unit.sizes:
            clock.compute(f"backward {unit.name}", unit.cost.backward_s / len(unit.sizes))
            if passes.window.gradient_arrived(unit, elements):
                passes.take_turn()
        if unit.leave_backward(calls[unit]):
            passes.after_backward(unit)
    passes.end_backward()
