"""A model of units that runs, and differentiates itself, as autograd and the hooks would.

Each rank may leave out units, run them again, or keep what they return from the loss. What runs
must be unsharded; what is asserted here holds at every moment, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from vescale_fsdp.program.passes import Passes
from vescale_fsdp.program.predict import Names
from vescale_fsdp.program.residency import Lease, State
from vescale_fsdp.program.window import policy_of

from .world import Group, Simulated, Unit, World


class Checkpoint(Enum):
    """How a unit is recomputed in the backward, with what is in it."""

    NONE = auto()
    AROUND = auto()  # checkpoint(unit, x): its forward runs again
    INSIDE = auto()  # the unit checkpoints what is in it


@dataclass(frozen=True)
class Spec:
    """One unit of the model."""

    parent: int  # -1 for the root
    frozen: bool = False
    empty: bool = False
    keeps: bool = False  # reshard_after_forward=False
    checkpoint: Checkpoint = Checkpoint.NONE


class Call:
    """One forward of a unit in the graph."""

    def __init__(self, unit: int, pass_number: int, *, takes_gradients: bool) -> None:
        self.unit, self.pass_number, self.takes_gradients = unit, pass_number, takes_gradients
        self.children: list[Call] = []
        self.is_used = True  # by the loss
        self.has_graph = True  # not within a reentrant checkpoint: that makes it again


@dataclass
class Choice:
    """What a rank does in a forward.

    Attributes:
        skips: units that it leaves out, with what is in them.
        repeats: units that run twice.
        unused: units whose outputs the loss does not depend on.
        holds: whether such outputs are kept (a list of losses for a log).
        fails_at: a unit in whose forward an exception is raised.
    """

    skips: int = 0
    repeats: int = 0
    unused: int = 0
    holds: bool = False
    fails_at: int = -1


class Boom(Exception):
    """What a model raises on purpose."""


@dataclass
class Model:
    """The model of one rank."""

    world: World
    rank: int
    specs: Sequence[Spec]
    order: Sequence[int]  # in which units run, among those beside them
    in_flight: int
    units: list[Unit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.executor = Simulated(self.world, self.rank)
        self.children: list[list[int]] = [[] for _ in self.specs]
        names: list[str] = []
        for index, spec in enumerate(self.specs):
            sizes = [] if spec.empty else [6, 6]
            self.units.append(Unit(self.world, self.rank, sizes, spec.frozen))
            if spec.keeps and index:
                self.units[index].reshard_after_forward = False
            around = names[spec.parent] if index else ""
            names.append(f"{around}.u{index}".lstrip(".") if index else "")
            if index:
                self.children[spec.parent].append(index)
        for each in self.children:
            each.sort(key=lambda unit: self.order[unit])
        self.units[0].is_root = True
        empty = {index for index, spec in enumerate(self.specs) if spec.empty}
        self.passes = Passes(
            self.units,
            Names(names, ["Block"] * len(names), empty),
            self.executor,
            policy_of(self.in_flight, [], has_streams=False),
            can_settle=True,
        )
        self.passes.rank = self.rank
        for unit in self.units:
            unit.executor = self.executor
        self.executor.groups = {
            index: Group(self.world, self.rank, unit, self.executor)
            for index, unit in enumerate(self.units)
            if unit.sizes
        }
        self.kept: list[Call] = []  # graphs that something holds

    # Forward

    def forward(self, choice: Choice, *, grads: bool, first: int = 0) -> Call | None:
        """Run the model, or one of its units alone. Returns its graph."""
        try:
            call = self._run(first, choice, grads, enters=False, can_fail=True)
        except Boom:
            self._check_between_passes()
            return None
        self._check_between_passes()
        return call if grads else None

    def _run(
        self, index: int, choice: Choice, grads: bool, *, enters: bool, can_fail: bool
    ) -> Call | None:
        """``enters``: whether the unit's inputs want gradients."""
        unit, spec = self.units[index], self.specs[index]
        self.passes.before_forward(unit, "forward", grads)
        unit.leases.discard(Lease.USER)
        unit.leases.add(Lease.FORWARD)
        call = Call(index, self.passes.num_passes, takes_gradients=enters) if grads else None
        without_graph = spec.checkpoint is Checkpoint.AROUND and grads
        if call is not None and not without_graph:
            unit.open_calls.add(call)
        fails = can_fail and choice.fails_at == index
        try:
            flows = self._inside(index, choice, grads, call, enters=enters)
            if fails:
                raise Boom
        except Boom:
            self._end(unit, call, has_failed=True, flows=False, without_graph=without_graph)
            raise
        self._end(unit, call, has_failed=False, flows=flows, without_graph=without_graph)
        return call if flows else None

    def _inside(
        self, index: int, choice: Choice, grads: bool, call: Call | None, *, enters: bool
    ) -> bool:
        """Run what is in a unit; returns whether its output wants a gradient."""
        unit, spec = self.units[index], self.specs[index]
        self._check_runs(unit)
        flows = enters or unit.trainable
        for child in self.children[index]:
            if choice.skips >> child & 1:
                continue
            for _ in range(1 + (choice.repeats >> child & 1)):
                inside_graph = grads and not (
                    call is not None and spec.checkpoint is Checkpoint.AROUND
                )
                made = self._run(child, choice, inside_graph, enters=flows, can_fail=True)
                flows = flows or self._wants(child)
                if made is not None and call is not None:
                    made.is_used = not choice.unused >> child & 1
                    if made.is_used or choice.holds:
                        call.children.append(made)
        self._check_runs(unit)
        return flows

    def _wants(self, index: int) -> bool:
        return self.units[index].trainable or any(map(self._wants, self.children[index]))

    def _end(
        self,
        unit: Unit,
        call: Call | None,
        *,
        has_failed: bool,
        flows: bool,
        without_graph: bool,
    ) -> None:
        has_call = call is not None and not without_graph
        self.passes.after_forward(
            unit,
            has_failed=has_failed,
            is_closed=has_call and call is not None and not call.takes_gradients,
            is_visited=flows and has_call,
            is_hidden=not has_call,
        )
        unit.leases.discard(Lease.FORWARD)

    # Backward

    def backward(self, calls: Sequence[Call], choice: Choice, *, fails_at: int = -1) -> None:
        """Differentiate graphs, the last first; raise in the backward of ``fails_at``."""
        if not calls:
            return
        self.passes.begin_backward()
        for call in reversed(calls):
            self._differentiate(call, choice, fails_at)
        self.passes.end_backward()
        self._check_between_passes()

    def _differentiate(self, call: Call, choice: Choice, fails_at: int) -> None:
        unit, spec = self.units[call.unit], self.specs[call.unit]
        if spec.checkpoint is Checkpoint.AROUND:
            again = self._recompute(call, choice)
            if again is not None:
                self._through(again, choice, fails_at)
            return
        unit.open_calls.add(call)
        self._through(call, choice, fails_at)

    def _through(self, call: Call, choice: Choice, fails_at: int) -> None:
        unit, spec = self.units[call.unit], self.specs[call.unit]
        unit.enter_backward(call)
        self.passes.before_backward(unit)
        if call.unit == fails_at:
            raise Boom
        self._check_runs(unit)
        if spec.checkpoint is Checkpoint.INSIDE:  # the graph is that of the forward
            for child in call.children:
                self._recompute(child, choice)
        for child in reversed(call.children):
            if child.is_used:
                self._differentiate(child, choice, fails_at)
        self._check_runs(unit)
        group = self.executor.groups.get(call.unit)
        if group is not None and unit.trainable:
            for size in unit.sizes:
                group.waiting += 1
                if self.passes.window.gradient_arrived(unit, size):
                    self.passes.take_turn()
        if call.takes_gradients and unit.leave_backward(call):
            self.passes.after_backward(unit)

    def _recompute(self, call: Call, choice: Choice) -> Call | None:
        """A checkpointed unit runs again, with what ran in it."""
        unit = self.units[call.unit]
        if Lease.BACKWARD in unit.leases:
            unit.start_unshard()
            unit.wait_for_unshard()
        else:
            self.passes.recompute(unit)
        again = Call(call.unit, self.passes.num_passes, takes_gradients=call.takes_gradients)
        unit.open_calls.add(again)
        self._check_runs(unit)
        flows = call.takes_gradients or unit.trainable
        for child in self.children[call.unit]:
            if choice.skips >> child & 1:
                continue
            for _ in range(1 + (choice.repeats >> child & 1)):
                inner = Call(child, call.pass_number, takes_gradients=flows)
                made = self._recompute(inner, choice)
                flows = flows or self._wants(child)
                if made is not None:
                    made.is_used = not choice.unused >> child & 1
                    if made.is_used or choice.holds:
                        again.children.append(made)
        return again if flows else None

    # What holds

    def _check_runs(self, unit: Unit) -> None:
        is_there = unit.state is State.UNSHARDED or not unit.sizes
        assert is_there, f"rank {self.rank} computes with unit {unit.index}, {unit.state}"
        ahead = [u.index for u in self.units if u.leases == {Lease.AHEAD}]
        room = self.passes.window.policy.unshards
        assert len(ahead) <= room, f"{ahead} are ahead, with room for {room}"

    def _check_between_passes(self) -> None:
        for unit in self.units:
            stays = unit.leases & {Lease.KEPT, Lease.RESTING, Lease.USER, Lease.PINNED}
            assert unit.is_sharded or stays, (unit.index, unit.state, unit.leases)

    def check_after_backward(self) -> None:
        """After a step that was synchronized nothing is left, and each group is reduced once."""
        for unit in self.units:
            assert unit.is_sharded, (unit.index, unit.state, unit.leases)
        for group in self.executor.groups.values():
            assert group.waiting == 0, f"gradients of {group.number} were not reduced"
