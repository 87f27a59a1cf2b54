"""A rank's step as data: what the scheduler decides at each event, without tensors and time.

The caller says what modules and autograd say in a step: a forward begins, half of a unit's
gradients are there. It gets what the engine would carry out then, in order. A root and two blocks
on an accelerator, with ``in_flight=2``::

    forward of 0 begins     BEGIN_PASS, GATHER 0, GATHER 1 (prefetched), WAIT 0
    forward of 1 begins     GATHER 2 (prefetched), WAIT 1
    forward of 1 ends       FREE 1
    ...
    backward of 2 begins    GATHER 1 (prefetched), WAIT 2
    backward of 2 ends      FREE 2, REDUCE 2

=============  ===================================================================================
BEGIN_PASS     the outermost forward begins
GATHER         of a unit. Items: the units sent now in one message; none, if it was sent before
WAIT           the parameters of a unit are needed
DROP_MESSAGE   no backward will send the encoded message of a unit again
FREE           the parameters of a unit
REDUCE         items: groups whose reductions are issued together
FINISH         items: the group whose reduction is waited for, if one is under way
END_WALK       messages of several units that have not run are dropped
END_BACKWARD   all reductions have been waited for
=============  ===================================================================================

Bytes and seconds are the caller's: no decision depends on them, but for small messages. All ranks
are taken to run the same, so predicted passes need no confirmation.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from vescale_fsdp.program.executor import Executor
from vescale_fsdp.program.order import Bundles, Program, Sendable
from vescale_fsdp.program.passes import Passes
from vescale_fsdp.program.predict import Names
from vescale_fsdp.program.record import Record
from vescale_fsdp.program.reductions import Reduction
from vescale_fsdp.program.residency import Residency
from vescale_fsdp.program.window import policy_of

Act = Enum("Act", "BEGIN_PASS GATHER WAIT DROP_MESSAGE FREE REDUCE FINISH END_WALK END_BACKWARD")


class Action(NamedTuple):
    """An act, with the unit and the items that it is about."""

    act: Act
    unit: int = -1
    items: Sequence[int] = ()
    in_backward: bool = False


class RehearsedUnit(NamedTuple):
    """What the scheduler knows of a unit.

    Attributes:
        sizes: elements of each of its parameters.
        trainable: of each of its groups, whether it gets gradients.
        keeps: it stays unsharded from forward to backward.
        gather: its part of an all-gather of several units; None if it is sent alone.
        reduces: the same for the reduction of each group.
    """

    sizes: Sequence[int]
    trainable: Sequence[bool]
    keeps: bool
    gather: Sendable | None
    reduces: Sequence[Sendable | None]


class _Call:
    """Stands for a forward in the autograd graph."""

    pass_number = 0


class _Unit(Residency):
    version = 0
    is_stale = has_streams = trainable = all_trainable = False  # the last three: see __init__

    def __init__(self, index: int, of: RehearsedUnit, step: Rehearsal, reshards: bool) -> None:
        super().__init__()
        self.index, self.is_root, self.sizes, self._step = index, index == 0, of.sizes, step
        self.has_streams, self.gather = step.has_streams, of.gather
        self.trainable, self.all_trainable = any(of.trainable), all(of.trainable)
        self.reshard_after_forward, self.reshard_after_backward = not of.keeps, reshards
        self._is_there = False

    @property
    def is_sharded(self) -> bool:
        return not self._is_there

    def start_unshard(self, *, in_backward: bool = False) -> None:
        if self.sizes and not self._is_there:
            self._is_there = True
            together = self._step.sent_with(self.index)
            items = [self.index] if together is None else together
            self._step.add(Act.GATHER, self.index, items, in_backward)

    def wait_for_unshard(self) -> None:
        self._step.add(Act.WAIT, self.index)

    def keeps_no_message(self) -> None:
        self._step.add(Act.DROP_MESSAGE, self.index)

    def join_unshard(self) -> None: ...

    def park(self) -> None: ...

    def free(self) -> None:
        if self._is_there:
            self._is_there = False
            self._step.add(Act.FREE, self.index)

    def free_but_part(self) -> None:
        self.free()


class _Group(Reduction):
    has_gradients = False

    def __init__(self, number: int, unit: _Unit, sendable: Sendable | None) -> None:
        self.number, self.unit, self.sendable = number, unit, sendable
        self._step = unit._step

    def has_arrived(self) -> bool:
        return True

    def finish(self) -> None:
        self._step.add(Act.FINISH, items=[self.number])


class Rehearsal(Executor):
    """The steps of a model on one rank, event by event. Each method returns what is done then.

    Args:
        units: the root first. Groups are numbered through all of them.
        in_flight: as of ``fully_shard``.
        has_streams: of the device.
        reshards: parameters are sharded between steps.
        reduces_always: also in backwards that do not synchronize.
        sends_small: neighbours of few bytes share messages (`order`).
    """

    def __init__(
        self,
        units: Sequence[RehearsedUnit],
        *,
        in_flight: int,
        has_streams: bool,
        reshards: bool,
        reduces_always: bool,
        sends_small: bool,
    ) -> None:
        self.has_streams, self._reduces_always = has_streams, reduces_always
        self._actions: list[Action] = []
        self._calls: dict[int, _Call] = {}
        self._bundles: Bundles | None = None
        self._sends_small = sends_small and not has_streams
        self._units = [_Unit(index, each, self, reshards) for index, each in enumerate(units)]
        self._groups: list[_Group] = []
        number = 0
        for unit, of in zip(self._units, units, strict=True):
            for trained, sendable in zip(of.trainable, of.reduces, strict=True):
                if trained:
                    self._groups.append(_Group(number, unit, sendable))
                number += 1
        titles = ["", *(f"units.{index}" for index in range(1, len(units)))]
        empty = {index for index, each in enumerate(units) if not each.trainable}
        policy = policy_of(in_flight, [], has_streams=has_streams)
        names = Names(titles, ["Unit"] * len(titles), empty)
        self._passes = Passes(self._units, names, self, policy, can_settle=True, trusts=True)

    def add(self, act: Act, unit: int = -1, items: Sequence[int] = (), back: bool = False) -> None:
        """Units and groups do this."""
        self._actions.append(Action(act, unit, items, back))

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # Events of a step. A call is any number that a forward and its backward have in common.

    def begin(self, *, synchronizes: bool) -> None:
        """A micro-batch begins; ``synchronizes`` as ``set_requires_gradient_sync`` says."""
        self._calls.clear()
        for unit in self._units:
            unit.requires_gradient_sync = synchronizes

    def before_forward(self, unit: int, call: int) -> list[Action]:
        """The forward of a unit begins."""
        self._units[unit].open_calls.add(self._calls.setdefault(call, _Call()))
        self._passes.before_forward(self._units[unit], "forward", True)
        return self._taken()

    def after_forward(
        self, unit: int, call: int, *, is_closed: bool, is_visited: bool, is_reachable: bool = True
    ) -> list[Action]:
        """It has ended. See `Passes.after_forward`; ``is_reachable``: a gradient may come back."""
        self._passes.after_forward(self._units[unit], is_closed=is_closed, is_visited=is_visited)
        if not is_reachable:
            self._units[unit].open_calls.discard(self._calls[call])
        return self._taken()

    def begin_backward(self) -> list[Action]:
        """The backward of the model begins."""
        self._passes.begin_backward()
        return self._taken()

    def before_backward(self, unit: int, call: int) -> list[Action]:
        """A gradient has reached the outputs of a unit's call."""
        self._units[unit].enter_backward(self._calls[call])
        self._passes.before_backward(self._units[unit])
        return self._taken()

    def half_of_gradients(self, unit: int) -> list[Action]:
        """The gradients of the later half of a unit's parameters are there."""
        if self._passes.window.gradient_arrived(self._units[unit], sum(self._units[unit].sizes)):
            self._passes.take_turn()
        return self._taken()

    def after_backward(self, unit: int, call: int) -> list[Action]:
        """All gradients of the call are there."""
        if self._units[unit].leave_backward(self._calls[call]):
            self._passes.after_backward(self._units[unit])
        return self._taken()

    def finish_backward(self) -> list[Action]:
        """The backward of the model has ended."""
        self._passes.end_backward()
        return self._taken()

    # What the passes call

    def sent_with(self, unit: int) -> list[int] | None:
        """See `Bundles.send_with`."""
        return None if self._bundles is None else self._bundles.send_with(unit)

    def settle(self, mine: Record, timeout_s: float | None) -> Record:
        return mine

    def compare(self, entries: Sequence[str], unit: Residency | None) -> None: ...

    def stall(self) -> None: ...

    def begin_pass(self, first: Residency) -> None:
        self.add(Act.BEGIN_PASS)

    def begin_walk(self, program: Program, *, in_backward: bool) -> None:
        if self._sends_small:
            self._bundles = Bundles(program, lambda index: self._units[index].gather)

    def end_walk(self) -> None:
        self._bundles = None
        self.add(Act.END_WALK)

    def due(self) -> Sequence[Reduction]:
        always = self._reduces_always
        return [each for each in self._groups if always or each.unit.requires_gradient_sync][::-1]

    def start_reductions(self, batch: Sequence[Reduction]) -> None:
        self.add(Act.REDUCE, items=[each.number for each in batch])

    def end_backward(self) -> None:
        self.add(Act.END_BACKWARD)
