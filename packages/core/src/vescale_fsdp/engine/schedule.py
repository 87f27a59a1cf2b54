"""Schedule: the order of gathers and reductions in one model, shared by all of its units.

The order of a pass is recorded the first time, in agreement with the other ranks, and walked from
then on (`order`): while a unit computes, the gather of the one after it is under way. ``in_flight``
is how many units may be gathered or on their way for that at a time (1: no prefetch). Where a
forward turns into its backward, the ``in_flight - 2`` units that come back first stay gathered.

While an order is recorded, nothing is predicted. Each rank tells the others through the store which
unit it wants next, all take part in the gather that the order asks for first, and so ranks that
run different units end up with one order of all of them.

Reductions are part of the order of a backward. All groups that can get a gradient are reduced in
every backward that synchronizes, as zeros where this rank has none.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import Comm, hand_back, plain_tensors
from vescale_fsdp.engine.agreement import LONG_TIMEOUT_S, agree, exchange
from vescale_fsdp.engine.comms import comm_for
from vescale_fsdp.engine.filling import Names, fill
from vescale_fsdp.engine.fingerprint import fingerprint_of
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.order import Order, Walk
from vescale_fsdp.engine.prefetch import Prefetch
from vescale_fsdp.engine.reductions import Due, Reductions
from vescale_fsdp.engine.turns import END, Turn, agree_on_turn
from vescale_fsdp.engine.usage import Usage
from vescale_fsdp.errors import RankMismatchError

if TYPE_CHECKING:
    from vescale_fsdp.engine.unit import Unit

__all__ = ["MEETING_TIMEOUT_S", "Schedule"]

_Kind: TypeAlias = tuple[int, str, bool]  # first unit, its method, whether gradients are wanted
_BackKind: TypeAlias = tuple[_Kind, int, tuple[int, ...]]  # of the forward, number, groups due
_SAME_MODEL = "Build the same model, with the same arguments of fully_shard, on every rank"
_SAME_MESH = "Pass the same mesh, and the same arguments that name its axes, on every rank"
_SAME_ORDER = (
    "Run units in the same order on every rank. A rank may leave out units that others run if all "
    "units of the model are on one mesh; if not, make what it leaves out part of a larger unit"
)
_MAX_BACKWARDS = 3  # after one forward, with orders of their own; later ones follow the last
MEETING_TIMEOUT_S = 10.0  # ranks that have caught an exception in the same step come soon
_SHORT_TIMEOUT_S = 120.0  # for ranks that are in the same step
# Models that ran so far in a world, by the ranks they are on.
_NUM_MODELS: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[object, ...]]] = (
    weakref.WeakKeyDictionary()
)


class Schedule:
    """What the units of one root share: communicators, order, and what is in flight.

    Args:
        units: of the model, outermost first (``named_modules`` order). Held weakly.
        unused: "auto", "exchange" or "zeros", as of ``fully_shard``.
        in_flight: units gathered at a time, less a reduction under way, as of ``fully_shard``.

    Raises:
        RankMismatchError: other ranks have another model or other arguments.
    """

    def __init__(self, units: list[Unit], *, unused: str, in_flight: int) -> None:
        self._units = [weakref.ref(unit) for unit in units]
        self._index = {id(unit): index for index, unit in enumerate(units)}
        self._names = Names([unit.fqn for unit in units], [unit.kind for unit in units])
        self.in_flight = in_flight
        groups = [group for unit in units for group in unit.groups]
        self._group_index = {id(group): index for index, group in enumerate(groups)}
        # By the ranks they are over, in one order on every rank.
        self._axes = {(g.axes.shard_ranks, g.axes.replica_ranks): g.axes for g in groups}
        described = fingerprint_of(units)
        for axes in self._axes.values():
            agree("mesh", [repr(axes)], axes.ranks, _SAME_MESH)
            for group in axes.groups:
                agree("model", described, group, _SAME_MODEL)
        # Counted by those alone that agree: the others may have counted another mesh.
        world = dist.group.WORLD
        assert world is not None, "a device mesh has initialised torch.distributed"
        models = _NUM_MODELS.setdefault(world, Counter())
        models[tuple(self._axes)] += 1
        self._number = models[tuple(self._axes)]
        self._comms = {id(group): comm_for(group.axes) for group in groups}
        # Whether all ranks that share a unit share all of them, and so can agree on an order.
        self._can_settle = len(self._axes) == 1
        self._always_records = os.environ.get("VESCALE_FSDP_CHECK_ORDER", "0") == "1"
        self._prefetch = Prefetch(self._units, self._index, in_flight)
        # Forward
        self._running = 0  # forwards of units that have begun and not ended
        self._has_failed = False  # whether the last pass has ended by an exception, on any rank
        self._has_left = False  # a step, by an exception on this rank
        self._kind: _Kind = (0, "", False)
        self._orders: dict[_Kind, Order] = {}
        self._forward = Walk(Order())
        self._stays: set[int] = set()  # units that the backward would gather first
        # Backward
        self._end: weakref.ref[_End] | None = None  # of the backward that is running
        self._last_kind: _Kind = (0, "", True)  # of the last pass that wanted gradients
        self._last_forward = self._forward
        self._ran: set[int] = set()  # on this rank, since the first forward after a backward
        self._ran_anywhere: set[int] = set()  # in the forward of what was recorded last
        self._num_backwards = 0  # since that pass
        self._back_kind: _BackKind = (self._last_kind, 0, ())
        self._back_orders: dict[_BackKind, Order] = {}
        self._first_back: dict[_Kind, Order] = {}  # of the first backward after each forward
        self._backward = Walk(Order())
        self._reductions = self._no_reductions()
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
        return max(given, default=min(self.in_flight - 1, 1))

    @property
    def wants_gradients(self) -> bool:
        """Whether a backward may follow the forward that is running."""
        return self._kind[2]

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is under way."""
        return self._running > 0 or (self._end is not None and self._end() is not None)

    @property
    def _has_broken_off(self) -> bool:
        """Whether a backward has begun, and raised before its end."""
        return self._end is not None and self._end() is None

    # Forward

    def before_forward(self, unit: Unit, method: str, wants_gradients: bool) -> None:
        """Gather ``unit``, of which ``method`` begins, and start on the units after it."""
        if compat.current_backward() != -1:  # recomputation
            self.begin_backward()
            self._gather(unit, self._backward, recomputes=True)
            return
        if self._has_broken_off:
            self.reset()
            self._has_left = True
        if self._running == 0:
            if self._has_left:
                self._meet(MEETING_TIMEOUT_S)
            self._begin_pass(unit, method, wants_gradients)
        self._gather(unit, self._forward)
        self._running += 1

    def after_forward(self, has_failed: bool) -> None:
        """The forward of a unit has ended, perhaps by an exception."""
        if compat.current_backward() != -1:
            return
        self._running = max(self._running - 1, 0)
        if self._running == 0:
            self._end_pass(has_failed)

    def _begin_pass(self, first: Unit, method: str, wants_gradients: bool) -> None:
        for unit in self.units():  # what a forward without a backward, or an error, has left
            if not unit.is_sharded and unit.may_release:
                unit.reshard()
        event, first.post_optim_event = first.post_optim_event, None
        if event is not None and torch.accelerator.is_available():
            torch.accelerator.current_stream().wait_event(event)
        for unit in self.units():
            for group in unit.groups:
                group.start_outer_gather(self.comm(group))
        self._prefetch.forget()
        self._kind = (self._index[id(first)], method, wants_gradients)
        self._forward = Walk(None if self._always_records else self._orders.get(self._kind))
        back = None if self._forward.is_recording else self._first_back.get(self._kind)
        coming = dict.fromkeys(back.gathers if back and self._can_settle else [])
        self._stays = set(itertools.islice(coming, max(self.in_flight - 2, 0)))
        if wants_gradients:
            self._last_kind, self._last_forward = self._kind, self._forward
            if self._num_backwards:
                self._ran = set()
            self._num_backwards = 0

    def _end_pass(self, has_failed: bool) -> None:
        for unit in self.units():
            unit.end_pass()
        self._has_failed = has_failed
        if isinstance(sys.exception(), RankMismatchError):
            return  # there is no order to follow
        self._has_left = has_failed and self.wants_gradients
        if has_failed:  # elsewhere, perhaps: other ranks wait for us until they get there
            with contextlib.suppress(Exception):  # the one that is on its way says more
                self._catch_up(self._forward)
        else:
            self._catch_up(self._forward)
        if not self._has_failed:
            self._orders[self._kind] = self._finished(self._forward)
        self._prefetch.drop(but=set() if has_failed else self._stays)
        if not self.wants_gradients:
            hand_back()

    def stays(self, unit: Unit) -> bool:
        """Whether a unit that has run in the forward under way stays gathered for the backward.

        As it was told to, or because the backward would gather it again at once: then it counts as
        gathered ahead. The same on all ranks, whatever they have run: where they can settle an
        order, and not in a recomputation, which only some may make.
        """
        if unit.keeps_after_forward(self.wants_gradients):
            return True
        if compat.current_backward() != -1:
            return False
        index = self._index[id(unit)]
        comes_again = self._forward.find(index) is not None
        if index not in self._stays or comes_again or not unit.unshard_in_backward:
            return False
        self._prefetch.ahead.add(index)
        return True

    # Walking along an order, forward or backward

    def _gather(self, unit: Unit, walk: Walk, recomputes: bool = False) -> None:
        """Have ``unit`` gathered, and those under way that come after it in the order."""
        index = self._index[id(unit)]
        has_run = index in walk.ran
        walk.ran.setdefault(index)
        if walk is self._forward and self.wants_gradients:
            self._ran.add(index)
        needs_gather = bool(unit.groups) and (unit.is_sharded or index in self._prefetch.ahead)
        if walk.is_recording:
            if needs_gather:
                self._take_turns(index, walk, has_run, recomputes)
        elif (place := walk.find(index)) is not None:
            self._skip_to(place, walk)
            walk.place = place + 1
        elif needs_gather and has_run:
            if walk is self._forward:  # it has stayed, and may have been written to since
                unit.reshard()
            walk.wrap(index)
        elif needs_gather:
            # All ranks may have gone another way. If only some have, the others do not come here.
            what = f"{self._name(index)}, which is new at place {walk.place} of {self._step(walk)}"
            self._announce(what, unit, _SHORT_TIMEOUT_S)
            walk.insert(index)
        self._start(unit, walk)
        unit.finish_gather()

    def _start(self, unit: Unit, walk: Walk) -> None:
        """Start the gather of ``unit``, and those that are to be under way beside it."""
        self._prefetch.start(unit, walk, self._reductions if walk is self._backward else None)

    def _skip_to(self, place: int, walk: Walk) -> None:
        """Move to ``place``, and take part in the gathers before it that are not for this rank."""
        for index in walk.skip_to(place, again=walk is self._backward or self.wants_gradients):
            self._take_part(index, walk)
        if walk is self._backward:
            self._reductions.proceed()

    def _take_part(self, index: int, walk: Walk) -> None:
        """Gather a unit that this rank skips, for the others, and release it."""
        unit = self._units[index]()
        walk.skipped.add(index)
        if unit is None or not unit.groups or unit.is_busy:
            return
        in_backward = walk is self._backward
        if in_backward and not unit.is_sharded and index not in self._prefetch.ahead:
            unit.release_after_forward(comes_back=True)  # this rank alone has kept it
        self._start(unit, walk)
        unit.finish_gather()
        if not in_backward:
            unit.end_forward(self.stays(unit), self.wants_gradients)
            return
        if unit.reshard_after_backward:
            unit.reshard()
        if not unit.awaits_backward:
            self._reductions.complete(unit.groups[::-1])

    def _take_turns(
        self, wanted: int, walk: Walk, has_run: bool = False, recomputes: bool = False
    ) -> None:
        """While recording: take part in what other ranks want first, until it is our turn."""
        if not self._can_settle:
            self._announce_turn(wanted, walk)
            return
        if has_run and walk is self._forward and not self._kind[2]:
            walk.record(wanted)  # generation: what repeats without gradients is taken on trust
            return
        while True:
            mine = self._turn(wanted, walk, has_run, recomputes)
            turn = agree_on_turn(mine, self._ranks, self._precedence(walk))
            if walk is self._backward:
                self._reductions.issue(turn.complete, turn.late)
            if turn.unit == END:
                self._ran_anywhere, self._has_failed = set(turn.ran), turn.failed
                return
            walk.record(turn.unit, turn.recomputes)
            if turn.unit == wanted:
                return
            self._take_part(turn.unit, walk)

    def _turn(self, wanted: int, walk: Walk, has_run: bool, recomputes: bool) -> Turn:
        """What to tell the other ranks."""
        step = self._step(walk)
        wrong = ""
        if wanted in walk.skipped and not has_run:
            *_, before, _ = walk.ran
            wrong = (
                f"rank {dist.get_rank()} runs {self._name(wanted)} after {self._name(before)} in "
                f"{step}, another rank before it"
            )
        complete = self._reductions.ready if walk is self._backward else []
        forward = self._forward if walk is self._forward else self._last_forward
        ran = list(forward.ran) if wanted == END else []
        late = self._reductions.late if walk is self._backward else []
        failed = walk is self._forward and self._has_failed
        return Turn(step, wanted, recomputes, complete, late, ran, wrong, failed)

    def _announce_turn(self, wanted: int, walk: Walk) -> None:
        """While recording, with units on several meshes: raise unless all want the same."""
        if wanted == END:
            self._announce(f"the end of {self._step(walk)}")
            return
        self._announce(
            f"the gather of {self._name(wanted)} in {self._step(walk)}", self._units[wanted]()
        )
        walk.record(wanted)

    def _catch_up(self, walk: Walk) -> None:
        """At the end of a pass: take part in what other ranks have run."""
        if walk is self._backward:
            self._reductions.complete_rest()
        if walk.is_recording:
            self._take_turns(END, walk)
        else:
            self._skip_to(len(walk.order.gathers), walk)

    def _finished(self, walk: Walk) -> Order:
        """The order of a walk that has ended, for those that come."""
        if walk.is_recording and self._can_settle:
            is_backward = walk is self._backward
            fill(
                walk.order,
                self._names,
                self._may_come_back if is_backward else self._may_run,
                is_backward=is_backward,
            )
        return walk.order

    def _may_run(self, index: int, known: set[int]) -> bool:
        """Whether a later forward of this kind, that has the ``known`` units, may run another."""
        known = known | self._ran_anywhere  # some were kept, and needed no gather
        if index in known:
            return True
        if self._kind[1] == "forward" or self.wants_gradients:
            return self._names.around(index) in known
        return self._names.is_like(index, known)  # a method for a part of the model

    def _may_come_back(self, index: int, known: set[int]) -> bool:
        """Whether a later backward may gather a unit that this one did not need."""
        unit = self._units[index]()
        if unit is None or self._last_forward.order.last(index) is None:
            return False
        is_gathered = unit.unshard_in_backward and not unit.keeps_after_forward(True)
        ran_nowhere = index not in self._ran_anywhere
        is_like_others = ran_nowhere and self._names.is_like(index, known)
        return is_gathered and (unit.trainable or is_like_others)

    def _announce(
        self, what: str, unit: Unit | None = None, timeout_s: float = LONG_TIMEOUT_S
    ) -> None:
        """Compare the next step with the ranks that share it, through the store."""
        for axes in self._axes.values() if unit is None else (unit.groups[0].axes,):
            agree("next step", [what], axes.groups[0], _SAME_ORDER, timeout_s=timeout_s)

    def _precedence(self, walk: Walk) -> Callable[[int], list[int]]:
        """Which of several units is gathered first: the lowest."""
        if walk is self._forward:
            return lambda index: [index]
        return functools.partial(self._backward_precedence, self._last_forward.order, walk.order)

    def _backward_precedence(self, forward: Order, backward: Order, index: int) -> list[int]:
        """Last is first, but in a unit whose forward runs again what comes first is first."""
        path = self._names.paths[index]
        places = [forward.last(unit) or 0 for unit in (*path, index)]
        runs_forward = [False, *(unit in backward.recomputed for unit in path)]
        return [at if plus else -at for at, plus in zip(places, runs_forward, strict=True)]

    @property
    def _ranks(self) -> list[dist.ProcessGroup]:
        return [group for axes in self._axes.values() for group in axes.groups]

    def _name(self, index: int) -> str:
        unit = self._units[index]()
        return "a unit that is gone" if unit is None else unit.fqn or "the root"

    def _step(self, walk: Walk) -> str:
        if walk is self._backward:
            return f"backward of model {self._number}"
        first, method, wants_gradients = self._kind
        how = "" if wants_gradients else " without gradients"
        return f"{method} of {self._name(first)} of model {self._number}{how}"

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
        due = []
        for unit in self.units():
            reduces = unit.requires_gradient_sync or unit.row.cuts_gradients
            for group in unit.groups:
                group.gradients.sums_replicas = unit.requires_all_reduce
                group.gradients.wait_for_more(not reduces)
                if reduces and group.trainable:
                    due.append(
                        Due(self._group_index[id(group)], group, unit, self._index[id(unit)])
                    )
        due.reverse()
        indices = tuple(item.number for item in due)
        self._back_kind = (self._last_kind, min(self._num_backwards, _MAX_BACKWARDS), indices)
        order = None if self._always_records else self._back_orders.get(self._back_kind)
        self._backward = walk = Walk(order)
        most = self.max_reductions if due else 1
        is_told = any(unit.max_reductions is not None for unit in self.units())
        most_at_end = max(most - 1, 0) if is_told else most  # what a user says holds to the end
        self._reductions = Reductions(
            due, walk, self._ran, self._can_settle, self.comm, most, most_at_end
        )

    def _no_reductions(self) -> Reductions:
        return Reductions([], self._backward, set(), self._can_settle, self.comm, 1, 1)

    def before_backward(self, unit: Unit) -> None:
        """Gather ``unit`` and start on the units whose backward comes after it."""
        self.begin_backward()
        for group in unit.groups:
            group.frees_before_backward = not unit.unshard_in_backward
        if unit.unshard_in_backward:
            self._gather(unit, self._backward)

    def gradient_arrived(self, unit: Unit, num_elements: int) -> None:
        """A gradient of ``unit``, which has so many elements, was taken."""
        self.begin_backward()
        self._prefetch.gradient_arrived(unit, num_elements, self._backward, self._reductions)

    def after_backward(self, unit: Unit) -> None:
        """Release ``unit`` and reduce its gradients."""
        if unit.reshard_after_backward:
            unit.reshard()
        self._reductions.complete(unit.groups[::-1])

    def _end_backward(self) -> None:
        with plain_tensors():
            for unit in self.units():  # before their gradients are copied
                unit.release_open()
            self._catch_up(self._backward)
            self._prefetch.drop()
            self._reductions.finish()
            for unit in self.units():
                unit.end_backward()
            self._publish()
            hand_back()
        self._back_orders[self._back_kind] = order = self._finished(self._backward)
        if not self._num_backwards:
            self._first_back[self._last_kind] = order
        self._num_backwards += 1
        self._end, self._reductions = None, self._no_reductions()

    def _publish(self) -> None:
        """Set the gradients of the sharded parameters."""
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
            self._usage[key].mode = "zeros" if self.units()[0].gives_zeros else self._unused
            used = self._usage[key].of(groups, self.comm(groups[0]))
            for group, flags in zip(groups, used, strict=True):
                group.gradients.publish(flags)

    def reset(self) -> None:
        """Forget a step that was broken off by an exception. Its gradients are lost."""
        with plain_tensors():
            for unit in self.units():
                unit.reset()
        self._running, self._end = 0, None
        self._prefetch.forget()
        self._forward, self._backward = Walk(Order()), Walk(Order())
        self._reductions = self._no_reductions()

    def leave(self, timeout_s: float) -> None:
        """Drop the step that is under way, with all ranks. Does nothing between steps.

        Raises:
            RankMismatchError: a rank has not left it in time.
        """
        is_open = self.wants_gradients and bool(self._forward.ran) and not self._num_backwards
        self._has_left = self._has_left or is_open or self.is_running or self._has_broken_off
        self.reset()
        if self._has_left:
            self._meet(timeout_s)

    def _meet(self, timeout_s: float) -> None:
        """Wait, through the store, until all ranks have left the step that this one has left."""
        if self._always_records:  # the next gather is compared, and says more
            self._has_left = False
            return
        for axes in self._axes.values():
            for group in axes.groups:
                try:
                    exchange("end of a step", "", group, lambda _: "", timeout_s=timeout_s)
                except RankMismatchError as error:
                    raise RankMismatchError(
                        "an exception has ended a step on this rank, and not on all others: "
                        f"{error}. They wait for this rank in collectives of that step. Let the "
                        "exception end the process, and start all again from a checkpoint; or "
                        "agree before the forward that all ranks leave the step out"
                    ) from error
        self._has_left = False


class _End:
    """Called by autograd when a backward has ended. It dies uncalled if the backward raises."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __call__(self) -> None:
        self._schedule._end_backward()
