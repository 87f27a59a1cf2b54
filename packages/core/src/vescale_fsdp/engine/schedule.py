"""Schedule: the order of gathers and reductions in one model, shared by all of its units.

Gathers follow the order in which units run. The order of each pass is recorded and predicts the
next one: while a unit computes, the gather of the one after it is under way. ``in_flight`` is
how many units may be gathered or on their way for that at a time (1: no prefetch). A wrong
prediction costs a gather, nothing else. In the first pass nothing is predicted; instead each
gather is announced to the other ranks beforehand, so that a difference is an error and no hang.

Reductions follow one canonical order on every rank, whatever was used on it: a group whose
gradients are complete waits until the groups before it have been issued, and at the end of the
backward all that is left is issued, as zeros where there is no gradient. So ranks that use
different parameters still issue the same reductions. The order is that of definition, reversed, in
the first backward, and afterwards the order in which the first rank completed.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import Comm, plain_tensors
from vescale_fsdp.engine.agreement import agree
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.comms import comm_for
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.usage import Usage

if TYPE_CHECKING:
    from vescale_fsdp.engine.unit import Unit

__all__ = ["Schedule"]

_Kind = tuple[int, bool]  # of forward passes: the first unit, and whether gradients are wanted
_SAME_MODEL = "Build the same model, with the same arguments of fully_shard, on every rank"
_SAME_ORDER = (
    "Call the same units in the same order on every rank; a part of the model that only some "
    "ranks use must not be a unit of its own for now"
)


class Schedule:
    """What the units of one root share: communicators, order, and what is in flight.

    Args:
        units: of the model, outermost first (``named_modules`` order). Held weakly.
        unused: "auto", "exchange" or "zeros", as of ``fully_shard``.
        in_flight: units gathered ahead and reductions under way, as of ``fully_shard``.

    Raises:
        RankMismatchError: other ranks have another model or other arguments.
    """

    def __init__(self, units: list[Unit], *, unused: str, in_flight: int) -> None:
        self._units = [weakref.ref(unit) for unit in units]
        self._index = {id(unit): index for index, unit in enumerate(units)}
        self.in_flight = in_flight
        groups = [group for unit in units for group in unit.groups]
        # By the ranks they are over, in one order on every rank.
        self._axes = {(g.axes.shard_ranks, g.axes.replica_ranks): g.axes for g in groups}
        described = _describe(units)
        for axes in self._axes.values():
            for ranks in axes.groups:
                agree("model", described, ranks, _SAME_MODEL)
        self._comms = {id(group): comm_for(group.axes) for group in groups}
        # Forward
        self._running = 0  # forwards of units that have begun and not ended
        self._entered: list[int] = []  # units in the order this pass has begun them
        self._left: list[int] = []  # and ended them
        self._recorded: dict[_Kind, list[int]] = {}  # units in order, of the last such pass
        self._kind: _Kind = (0, False)
        self._expected = _Prediction([])
        self._ahead: set[int] = set()  # units that were gathered on a prediction
        # Backward
        self._end: weakref.ref[_End] | None = None  # of the backward that is running
        self._always_announce = os.environ.get("VESCALE_FSDP_CHECK_ORDER", "0") == "1"
        self._first_backward = True
        self._expected_back = _Prediction([])
        self._order = [weakref.ref(group) for group in reversed(groups)]
        self._reductions = _Reductions([], self)
        self._unused = unused
        self._usage = {key: Usage(unused) for key in self._axes}

    def units(self) -> list[Unit]:
        """The units that are still alive, outermost first."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    def comm(self, group: Group) -> Comm:
        """The communicators of a group's mesh axis."""
        return self._comms[id(group)]

    @property
    def max_reductions(self) -> int:
        """How many reductions may be under way at a time."""
        given = [unit.max_reductions for unit in self.units() if unit.max_reductions is not None]
        return max(given, default=self.in_flight)

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is under way."""
        return self._running > 0 or (self._end is not None and self._end() is not None)

    @property
    def _has_broken_off(self) -> bool:
        """Whether a backward has begun, and raised before its end."""
        return self._end is not None and self._end() is None

    # Forward

    def before_forward(self, unit: Unit) -> None:
        """Gather ``unit`` and start on the units after it."""
        index = self._index[id(unit)]
        if compat.current_backward() != -1:  # recomputation: the next unit is the one before
            self._gather(unit, self._expected_back.after(index), "backward")
            return
        if self._has_broken_off:
            self.reset()
        if self._running == 0:
            self._begin_pass(index)
            if unit.post_optim_event is not None:
                torch.accelerator.current_stream().wait_event(unit.post_optim_event)
                unit.post_optim_event = None
        self._running += 1
        self._entered.append(index)
        self._gather(unit, self._upcoming(unit.forward_prefetch, self._expected, index), "forward")

    def after_forward(self, unit: Unit, keep: bool, comes_back: bool) -> None:
        """Release ``unit`` unless it is to be kept; ``comes_back`` if a backward may follow."""
        if compat.current_backward() != -1:
            return
        self._left.append(self._index[id(unit)])
        self._running = max(self._running - 1, 0)
        if not keep:
            unit.release_after_forward(comes_back)
        elif unit.reshard_after_forward is False:
            for group in unit.groups:
                group.mark_kept()
        if self._running == 0:
            self._end_pass()

    def _begin_pass(self, first: int) -> None:
        for unit in self.units():  # what a forward without a backward, or an error, has left
            if not unit.is_sharded and unit.may_release:
                unit.reshard()
        self._kind = (first, torch.is_grad_enabled())
        self._expected = _Prediction(self._recorded.get(self._kind, []))
        self._entered, self._left = [], []

    def _end_pass(self) -> None:
        if self._is_first_pass:
            self._announce("the end of the forward")
        self._recorded[self._kind] = self._entered
        self._expected_back = _Prediction(self._left[::-1])
        self._drop_ahead()

    def _gather(self, unit: Unit, upcoming: Sequence[int], when: str) -> None:
        is_first = self._first_backward if when == "backward" else self._is_first_pass
        is_first = is_first or self._always_announce
        if is_first and unit.groups and unit.is_sharded:
            axes = unit.groups[0].axes
            self._announce(f"the gather of {unit.fqn or 'the root'} in {when}", axes)
        in_backward = when == "backward"
        unit.start_gather(in_backward=in_backward)
        self._ahead.discard(self._index[id(unit)])
        explicit = unit.backward_prefetch if in_backward else unit.forward_prefetch
        room = self.in_flight - 1 if explicit is None else len(explicit)
        for index in () if is_first else upcoming:
            if room == 0:
                break
            coming = self._units[index]()
            if coming is None or not coming.groups:
                continue
            if in_backward and not coming.unshard_in_backward:
                continue
            if coming.is_sharded:
                coming.start_gather(in_backward=in_backward)
                self._ahead.add(index)
            elif index not in self._ahead:
                continue  # kept since its forward: nothing to fetch
            room -= 1
        for group in unit.groups:
            group.finish_gather()

    def _upcoming(
        self, explicit: list[Unit] | None, expected: _Prediction, index: int
    ) -> Sequence[int]:
        """The units to gather ahead of time: those that the user has named, or as recorded."""
        recorded = expected.after(index)
        if explicit is None:
            return recorded
        return [self._index[id(unit)] for unit in explicit if id(unit) in self._index]

    @property
    def _is_first_pass(self) -> bool:
        return self._kind not in self._recorded

    def _announce(self, what: str, axes: Axes | None = None) -> None:
        """Compare the next step with the ranks that share it, through the store.

        Only in the first pass of a kind and in the first backward: a rank that gathers another
        unit would get a mix of both as parameters, or hang. Replicas do not gather together.
        """
        for each in self._axes.values() if axes is None else (axes,):
            agree("next step", [what], each.groups[0], _SAME_ORDER)

    def _drop_ahead(self) -> None:
        """Release what was gathered on a prediction that did not come true."""
        for index in self._ahead:
            unit = self._units[index]()
            if unit is not None:
                unit.reshard()
        self._ahead.clear()

    # Backward

    def begin_backward(self) -> None:
        """See that `_end_backward` runs when the backward that is running now has ended."""
        if self._has_broken_off:
            self.reset()
        if self._end is not None:
            return
        end = _End(self)
        self._end = weakref.ref(end)
        compat.queue_backward_callback(end)
        self._begin_reductions()

    def reduce_waiting(self) -> None:
        """Reduce what backwards without synchronization have left, outside of a backward."""
        self._begin_reductions()
        self._end_backward()

    def _begin_reductions(self) -> None:
        synced = {
            id(group)
            for unit in self.units()
            if unit.requires_gradient_sync
            for group in unit.groups
        }
        for unit in self.units():
            for group in unit.groups:
                group.gradients.sums_replicas = unit.requires_all_reduce
        groups = [alive for ref in self._order if (alive := ref()) is not None]
        for group in groups:
            group.gradients.wait_for_more(id(group) not in synced)
        due = [group for group in groups if id(group) in synced and group.trainable]
        self._reductions = _Reductions(due, self)

    def before_backward(self, unit: Unit) -> None:
        """Gather ``unit`` and start on the units whose backward comes after it."""
        self.begin_backward()
        for group in unit.groups:
            group.frees_before_backward = not unit.unshard_in_backward
        if unit.unshard_in_backward:
            index = self._index[id(unit)]
            upcoming = self._upcoming(unit.backward_prefetch, self._expected_back, index)
            self._gather(unit, upcoming, "backward")

    def after_backward(self, unit: Unit) -> None:
        """Release ``unit`` and reduce its gradients."""
        if unit.reshard_after_backward:
            unit.reshard()
        self._reductions.complete(unit.groups)

    def _end_backward(self) -> None:
        with plain_tensors():
            if self._first_backward:
                self._announce("the end of the backward")
            self._drop_ahead()
            self._reductions.finish()
            self._publish()
            for unit in self.units():
                unit.end_backward()
        self._end, self._first_backward = None, False
        self._reductions = _Reductions([], self)
        self._expected_back.rewind()

    def _publish(self) -> None:
        """Set the gradients, and adopt the first rank's order of reductions when it is new."""
        reduced = self._reductions.groups
        for pool in {id(group.pool): group.pool for group in reduced}.values():
            pool.trim()
        for key, axes in self._axes.items():
            here = [g for g in reduced if (g.axes.shard_ranks, g.axes.replica_ranks) == key]
            groups = [
                group for group in here if group.gradients.sums_replicas or axes.num_replicas == 1
            ]
            if not groups:
                continue
            places = {id(group): place for place, group in enumerate(groups)}
            completed = [
                places[id(reduced[i])]
                for i in self._reductions.completed
                if id(reduced[i]) in places
            ]
            self._usage[key].mode = "zeros" if self.units()[0].gives_zeros else self._unused
            used, order = self._usage[key].of(groups, completed, self.comm(groups[0]))
            for group, flags in zip(groups, used, strict=True):
                group.gradients.publish(flags)
            if len(self._axes) == 1:  # across meshes the order of definition stays
                self._adopt([groups[place] for place in order])

    def _adopt(self, first: list[Group]) -> None:
        """Reduce these groups first, in this order, from now on."""
        rest = [ref for ref in self._order if all(ref() is not group for group in first)]
        self._order = [*map(weakref.ref, first), *rest]

    def reset(self) -> None:
        """Forget a step that was broken off by an exception. Its gradients are lost."""
        with plain_tensors():
            for unit in self.units():
                unit.reset()
        self._running, self._end = 0, None
        self._entered, self._left = [], []
        self._ahead.clear()
        self._reductions = _Reductions([], self)
        self._expected_back.rewind()


class _End:
    """Called by autograd when a backward has ended. It dies uncalled if the backward raises."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __call__(self) -> None:
        self._schedule._end_backward()


class _Prediction:
    """A recorded order of units, with the place where the current pass is."""

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self._place = 0

    def rewind(self) -> None:
        self._place = 0

    def after(self, index: int) -> Sequence[int]:
        """Move to the next occurrence of ``index``; return what is expected after it."""
        for start in (self._place, 0):
            if index in self._order[start:]:
                self._place = self._order.index(index, start) + 1
                return self._order[self._place :]
        return ()


class _Reductions:
    """The reductions of one backward, issued in canonical order."""

    def __init__(self, groups: list[Group], schedule: Schedule) -> None:
        self.groups = groups
        self.completed: list[int] = []  # positions in ``groups``, as they became complete
        self._schedule = weakref.proxy(schedule)
        self._position = {id(group): i for i, group in enumerate(groups)}
        self._ready: set[int] = set()
        self._next = 0
        self._most = schedule.max_reductions if groups else 1
        self._flying: deque[Group] = deque()

    def complete(self, groups: Sequence[Group]) -> None:
        """These groups have all of their gradients."""
        for group in reversed(groups):
            position = self._position.get(id(group))
            if position is not None and position not in self._ready:
                self._ready.add(position)
                self.completed.append(position)
        while self._next in self._ready:
            self._issue(self.groups[self._next])
            self._next += 1

    def finish(self) -> None:
        """Issue what is left, and wait for everything."""
        for group in self.groups[self._next :]:
            self._issue(group)
        self._next = len(self.groups)
        self._land(0)
        for group in self.groups:  # gradients that came after their group was thought complete
            if group.gradients.are_waiting:
                self._issue(group)
        self._land(0)
        for group in self.groups:
            group.gradients.finish_sum()

    def _issue(self, group: Group) -> None:
        self._land(self._most - 1)
        group.gradients.start_reduce(self._schedule.comm(group))
        self._flying.append(group)

    def _land(self, most: int) -> None:
        """Wait for the oldest reductions until ``most`` are in flight."""
        while len(self._flying) > most:
            self._flying.popleft().gradients.finish_reduce()


def _describe(units: list[Unit]) -> list[str]:
    """What must be the same on every rank, one entry per unit and parameter."""
    entries = []
    for unit in units:
        entries.append(
            f"unit {unit.fqn!r} (reshard_after_forward={unit.reshard_after_forward}, in "
            f"{unit.num_parts} parts, {unit.mp_policy}, unused={unit.unused!r}, "
            f"in_flight={unit.in_flight})"
        )
        for group in unit.groups:
            plan = f"layout {group.layout.digest[:12]} over {group.num_shards} ranks"
            entries += [
                f"parameter {slot.fqn!r} (shape {tuple(slot.shape)}, {slot.sharded.dtype}, "
                f"requires_grad={slot.sharded.requires_grad}, {plan})"
                for slot in group.slots
            ]
    return entries
