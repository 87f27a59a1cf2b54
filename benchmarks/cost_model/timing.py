"""Simulates the time of a step, from sizes and rates, with a queue for compute and one for network.

The simulator is that of `vescale_fsdp_tune.costs`, on units that only take time::

    compute  | forward 1 | 2 | .. | the root, both ways | backward n | .. | backward 1 |
    network  | gathers 0, 1 | 2 | 3 ..    | gather n | n - 1, reduce n | .. | reduce 0

The network runs one collective at a time, in the order of issue. Without overlap (FSDP2 on CPU)
compute waits for each collective: that is a step in which one unit is in flight.

It does not include recomputation of activations, other traffic, stragglers, and communication of
the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vescale_fsdp_tune.costs.machine import Link
from vescale_fsdp_tune.costs.model import FP32
from vescale_fsdp_tune.costs.timeline import run_step as simulate
from vescale_fsdp_tune.costs.units import GroupCosts, GroupSeconds, How, UnitCosts


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


@dataclass(frozen=True)
class Step:
    """The times of a step.

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
        """Seconds of waiting, without compute and copies."""
        return self.step_s - self.compute_s - self.copy_s


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
    each = (root, *units)
    how = How("gloo" if takes_turns else "nccl", in_flight=2 if overlaps else 1)
    step = simulate([_costs(unit, link, is_root=unit is root) for unit in each], how)
    compute_s = sum(unit.forward_s + unit.backward_s for unit in each) + optimizer_s
    copy_s = sum(2 * unit.copy_out_s + unit.copy_in_s for unit in units)
    copy_s += root.copy_out_s + root.copy_in_s
    network_s = sum(2 * link.seconds(unit.gather_bytes) for unit in units)
    network_s += link.seconds(root.gather_bytes)
    network_s += sum(link.seconds(unit.reduce_bytes) for unit in each)
    return Step(sum(step.seconds.values()) + optimizer_s, compute_s, copy_s, network_s)


def _costs(unit: UnitCost, link: Link, *, is_root: bool) -> UnitCosts:
    seconds = GroupSeconds(
        gather_s=link.seconds(unit.gather_bytes),
        reduce_s=link.seconds(unit.reduce_bytes),
        decode_s=unit.copy_out_s,
        copy_s=unit.copy_in_s,
    )
    halves = (1, 1)  # of its gradients
    group = GroupCosts(1, 2, halves, FP32, FP32, FP32, trainable=True, seconds=seconds)
    return UnitCosts("", (group,), is_root, is_root, unit.forward_s, unit.backward_s)
