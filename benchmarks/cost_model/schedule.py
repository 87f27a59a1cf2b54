"""A step as one queue of compute and one of the network: seconds from sizes and rates.

The root is gathered first and kept; the other units run in order::

    compute  | forward 1 | 2 | .. | the root, both ways | backward n | .. | backward 1 |
    network  | gathers 0, 1 | 2 | 3 ..    | gather n | n - 1, reduce n | .. | reduce 0

A gather is issued when the unit before it begins, a reduction when its gradients are there, and
the network does one thing at a time, in the order of issue. One reduction is under way beside
the compute; the next waits for it. With turns (ours on CPU) the gather of the next unit waits
until half of a unit's backward is over and the reduction before has landed. Without overlap
(FSDP2 on CPU) compute waits for everything that is sent.

Not in it: activations and their recomputation, traffic of others, stragglers, and the
optimizer's own communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Link", "Step", "UnitCost", "run_step"]


@dataclass(frozen=True)
class Link:
    """A network as one rank sees it.

    Attributes:
        bytes_per_s: that it sends.
        latency_s: of a collective, whatever its size.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Of a collective in which a rank sends so many bytes; none takes no time."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True)
class UnitCost:
    """One unit in one step of one rank.

    Attributes:
        forward_s, backward_s: of compute alone.
        gather_bytes, reduce_bytes: that a rank sends in one gather and one reduction.
        copy_out_s: from what was gathered to the parameters, before each use of it.
        copy_in_s: from the gradients to what is reduced.
    """

    forward_s: float
    backward_s: float
    gather_bytes: float
    reduce_bytes: float
    copy_out_s: float = 0.0
    copy_in_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """What a step takes.

    Attributes:
        step_s: all of it.
        compute_s: forward, backward and optimizer.
        copy_s: of copies.
        network_s: that the network is busy.
    """

    step_s: float
    compute_s: float
    copy_s: float
    network_s: float

    @property
    def exposed_s(self) -> float:
        """Neither computed nor copied: waited."""
        return self.step_s - self.compute_s - self.copy_s


class _Clock:
    """Time of the one who computes, and when the network is free."""

    def __init__(self, link: Link, *, overlaps: bool) -> None:
        self._link, self._overlaps = link, overlaps
        self.now = self._free = self.network_s = 0.0

    def issue(self, num_bytes: float) -> float:
        """When it will have ended."""
        seconds = self._link.seconds(num_bytes)
        self.network_s += seconds
        self._free = max(self.now, self._free) + seconds
        if not self._overlaps:
            self.wait(self._free)
        return self._free

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


def run_step(
    root: UnitCost,
    units: Sequence[UnitCost],
    link: Link,
    *,
    overlaps: bool = True,
    takes_turns: bool = False,
    optimizer_s: float = 0.0,
) -> Step:
    """Run the schedule. The root's compute is what comes after the last unit (head and loss)."""
    clock = _Clock(link, overlaps=overlaps)
    clock.wait(clock.issue(root.gather_bytes))
    clock.now += root.copy_out_s
    _forward(clock, units)
    clock.now += root.forward_s
    _backward(clock, root, units, takes_turns=takes_turns)
    clock.now += root.copy_in_s
    clock.wait(clock.issue(root.reduce_bytes))
    clock.now += optimizer_s
    each = (root, *units)
    compute_s = sum(unit.forward_s + unit.backward_s for unit in each) + optimizer_s
    copy_s = sum(2 * unit.copy_out_s + unit.copy_in_s for unit in units)
    copy_s += root.copy_out_s + root.copy_in_s
    return Step(clock.now, compute_s, copy_s, clock.network_s)


def _forward(clock: _Clock, units: Sequence[UnitCost]) -> None:
    coming = clock.issue(units[0].gather_bytes) if units else 0.0
    for index, unit in enumerate(units):
        clock.wait(coming)
        if index + 1 < len(units):
            coming = clock.issue(units[index + 1].gather_bytes)
        clock.now += unit.copy_out_s + unit.forward_s


def _backward(
    clock: _Clock, root: UnitCost, units: Sequence[UnitCost], *, takes_turns: bool
) -> None:
    """All but the root's reduction, which waits for the first layer's gradients."""
    coming = clock.issue(units[-1].gather_bytes) if units else 0.0
    clock.now += root.backward_s
    reduced = 0.0
    for index in range(len(units) - 1, -1, -1):
        unit = units[index]
        clock.wait(coming)
        is_first, has_turn = index == len(units) - 1, index > 0
        clock.now += unit.copy_out_s
        if takes_turns and not is_first:
            clock.now += unit.backward_s / 2
            clock.wait(reduced)
            coming = clock.issue(units[index - 1].gather_bytes) if has_turn else 0.0
            clock.now += unit.backward_s / 2
        else:
            coming = clock.issue(units[index - 1].gather_bytes) if has_turn else 0.0
            clock.now += unit.backward_s
        clock.wait(reduced)
        clock.now += unit.copy_in_s
        reduced = clock.issue(unit.reduce_bytes)
    clock.wait(reduced)
