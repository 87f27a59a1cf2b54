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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

from vescale_fsdp import compat, devices, waiting
from vescale_fsdp.backends import is_fake
from vescale_fsdp.dbuffer import Comm, hand_back, plain_tensors
from vescale_fsdp.engine.agreement import LONG_TIMEOUT_S, agree
from vescale_fsdp.engine.attempts import store_for
from vescale_fsdp.engine.comms import comm_for
from vescale_fsdp.engine.filling import Names, fill
from vescale_fsdp.engine.fingerprint import agree_on_frozen, fingerprint_of
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.meeting import MEETING_TIMEOUT_S, meet
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
# Of the last forward; forwards since the last backward; backwards since; groups due; units kept.
_BackKind: TypeAlias = tuple[_Kind, int, int, tuple[int, ...], tuple[str, ...]]
_SAME_MODEL = "Build the same model, with the same arguments of fully_shard, on every rank"
_SAME_MESH = "Pass the same mesh, and the same arguments that name its axes, on every rank"
_SAME_ORDER = (
    "Run units in the same order on every rank. A rank may leave out units that others run if all "
    "units of the model are on one mesh; if not, make what it leaves out part of a larger unit"
)
_MAX_FORWARDS = 4  # before a backward, whose order is another with each; more are as so many
_MAX_BACKWARDS = 3  # after one forward, with orders of their own; later ones follow the last
# Models that ran so far in a world, by the ranks they are on.
_NUM_MODELS: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[object, ...]]] = (
    weakref.WeakKeyDictionary()
)


class Schedule:
    """What the units of one root share: communicators, order, and what is in flight.

    Args:
        units: of the model, outermost first (``named_modules`` order). Held weakly.
        unused: "auto" or "zeros", as of ``fully_shard``.
        in_flight: units gathered at a time, less a reduction under way, as of ``fully_shard``.

    Raises:
        RankMismatchError: other ranks have another model or other arguments.
    """

    def __init__(self, units: list[Unit], *, unused: str, in_flight: int) -> None:
        self._units = [weakref.ref(unit) for unit in units]
        self._index = {id(unit): index for index, unit in enumerate(units)}
        empty = {index for index, unit in enumerate(units) if not unit.groups}
        self._names = Names([unit.fqn for unit in units], [unit.kind for unit in units], empty)
        self.in_flight = in_flight
        groups = [group for unit in units for group in unit.groups]
        self._group_index = {id(group): index for index, group in enumerate(groups)}
        # By the ranks they are over, in one order on every rank.
        self._axes = {(g.axes.shard_ranks, g.axes.replica_ranks): g.axes for g in groups}
        described = fingerprint_of(units)
        for axes in self._axes.values():
            agree("mesh", [repr(axes)], axes.ranks, _SAME_MESH, timeout_s=LONG_TIMEOUT_S)
            for group in axes.groups:
                agree("model", described, group, _SAME_MODEL, timeout_s=LONG_TIMEOUT_S)
            if len(axes.ranks) > 1 and not is_fake():
                waiting.watch(store_for(axes.ranks, LONG_TIMEOUT_S), axes.ranks)
        # Counted by those alone that agree: the others may have counted another mesh.
        world = dist.group.WORLD
        assert world is not None, "a device mesh has initialised torch.distributed"
        models = _NUM_MODELS.setdefault(world, Counter())
        models[tuple(self._axes)] += 1
        self._number = models[tuple(self._axes)]
        for unit in units:
            for each in unit.groups:
                each.unit_name = each.gradients.unit_name = (
                    repr(unit.fqn) if unit.fqn else "the root"
                )
        self._comms = {id(group): comm_for(group.axes) for group in groups}
        # Whether all ranks that share a unit share all of them, and so can agree on an order.
        self._can_settle = len(self._axes) == 1
        self._always_records = os.environ.get("VESCALE_FSDP_CHECK_ORDER", "0") == "1"
        self._prefetch = Prefetch(self._units, self._index, in_flight)
        # Forward
        self.num_passes = 0
        self._running = 0  # forwards of units that have begun and not ended
        self._has_failed = False  # whether the last pass has ended by an exception, on any rank
        self._has_left = False  # a step, by an exception on this rank
        self._kind: _Kind = (0, "", False)
        self._orders: dict[_Kind, Order] = {}
        self._forward = Walk(Order())
        self._versions: list[list[tuple[int, int]] | None] = []  # when the pass began
        self._stays: set[int] = set()  # units that the backward would gather first
        # Backward
        self._end: weakref.ref[_End] | None = None  # of the backward that is running
        self._last_kind: _Kind = (0, "", True)  # of the last pass that wanted gradients
        self._last_forward = self._forward
        self._ran: set[int] = set()  # on this rank, since the first forward after a backward
        self._ran_anywhere: set[int] = set()  # in the forward of what was recorded last
        self._num_forwards = 0  # with gradients, since the last backward
        self._has_skipped = False  # whether this rank, or any, has left out units in them
        self._num_backwards = 0  # since the last of them
        self._back_kind: _BackKind = (self._last_kind, 0, 0, (), ())
        self._back_orders: dict[_BackKind, Order] = {}
        self._first_back: dict[_Kind, Order] = {}  # of the first backward after each forward
        self._backward = Walk(Order())
        self._reductions = self._no_reductions()
        self._frozen: dict[int, list[str]] = {}  # by group: what its last reduction left out
        self._unused = unused

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
            self._drop_step(MEETING_TIMEOUT_S)
        if self._running == 0:
            if self._has_left:
                self._meet(MEETING_TIMEOUT_S)
            self._begin_pass(unit, method, wants_gradients)
        self._gather(unit, self._forward)
        if self._running == 0:  # code of all kinds may run in it: `training_step`
            for group in unit.groups:
                group.is_exposed |= self.exposes(group)
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
        if event is not None:
            for device in {group.pool.device for unit in self.units() for group in unit.groups}:
                devices.wait_event(device, event)
        for unit in self.units():
            for group in unit.groups:
                group.start_outer_gather(self.comm(group))
        self._prefetch.forget()
        self._kind = (self._index[id(first)], method, wants_gradients)
        self.num_passes += 1
        self._say("in", self._forward)
        self._forward = Walk(None if self._always_records else self._orders.get(self._kind))
        back = None if self._forward.is_recording else self._first_back.get(self._kind)
        coming = dict.fromkeys(back.gathers if back and self._can_settle else [])
        self._stays = set(itertools.islice(coming, max(self.in_flight - 2, 0)))
        self._versions = []
        if self._forward.is_recording:
            units = (ref() for ref in self._units)
            self._versions = [None if unit is None else unit.versions for unit in units]
        if wants_gradients:
            self._last_kind, self._last_forward = self._kind, self._forward
            if self._num_backwards:
                self._num_forwards, self._has_skipped = 0, False
                self._ran = set()
            self._num_forwards += 1
            self._num_backwards = 0

    def _end_pass(self, has_failed: bool) -> None:
        for unit in self.units():
            unit.end_pass()
        self._say("after", self._forward)
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

    def exposes(self, group: Group) -> bool:
        """Whether the pass may write to gathered parameters in ways that no version tells.

        As ``p.data.mul_()`` does. To find out costs a comparison with the shard; on an accelerator
        it is made in methods of the user's only, as Lightning's ``training_step``.
        """
        return self._kind[1] != "forward" or not group.has_streams

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

    def is_ahead(self, unit: Unit) -> bool:
        """Whether ``unit`` is gathered before anybody wants it."""
        return self._index[id(unit)] in self._prefetch.ahead

    # Walking along an order, forward or backward

    def _gather(self, unit: Unit, walk: Walk, recomputes: bool = False) -> None:
        """Have ``unit`` gathered, and those under way that come after it in the order."""
        index = self._index[id(unit)]
        has_run = index in walk.ran
        walk.ran.setdefault(index)
        if walk is self._forward and self.wants_gradients:
            self._ran.add(index)
        if not unit.groups:  # it has no place in any order
            self._start(unit, walk)
            return
        needs_gather = unit.is_sharded or index in self._prefetch.ahead
        if walk is self._forward and self._versions and self._versions[index] != unit.versions:
            walk.order.written.add(index)
        if walk.is_recording:
            if needs_gather:
                self._take_turns(index, walk, has_run, recomputes)
        elif not needs_gather and (has_run or index in walk.held or self._is_kept(unit, walk)):
            pass  # it is there: what the order has of it is for a later use
        elif (place := walk.find(index)) is not None:
            self._skip_to(place, walk)
            walk.place = place + 1
        elif needs_gather and has_run:
            if walk is self._forward:  # it has stayed, and may have been written to since
                unit.reshard()
                walk.wrap(index)
            else:  # once more than in the recorded one: after all that other ranks may still want
                self._skip_to(len(walk.order.gathers), walk)
                walk.insert(index)
        elif needs_gather:
            # All ranks may have gone another way. If only some have, the others do not come here.
            what = f"{self._name(index)}, which is new at place {walk.place} of {self._step(walk)}"
            self._announce(what, unit)
            walk.insert(index)
            if walk is self._forward:  # what backwards after it have recorded is without this unit
                stale = [kind for kind in self._back_orders if kind[0] == self._kind]
                for kind in stale:
                    del self._back_orders[kind]
        self._start(unit, walk)
        unit.finish_gather()

    def _is_kept(self, unit: Unit, walk: Walk) -> bool:
        """Whether a setting has kept it for the backward: orders do not have that use of it."""
        by_hand = unit.held or bool(unit.pins)
        return walk is self._backward and unit.keeps_after_forward(True) and not by_hand

    def _start(self, unit: Unit, walk: Walk) -> None:
        """Start the gather of ``unit``, and those that are to be under way beside it."""
        if walk is self._forward and unit.is_stale:
            # It was gathered ahead, and then written to: on all ranks, if they run the same code.
            what = f"another gather of {self._name(self._index[id(unit)])}, which was written to"
            self._announce(f"{what} in {self._step(walk)}", unit)
            unit.reshard()
            walk.order.written.add(self._index[id(unit)])
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
        self._has_skipped = True
        if unit is None or not unit.groups:
            return
        in_backward = walk is self._backward
        if in_backward and not (unit.unshard_in_backward or index in walk.order.recomputed):
            return
        if unit.is_busy and not unit.is_sharded:
            unit.take_part()
            return
        if unit.held and not in_backward:  # by hand, on all ranks
            if walk.is_recording:  # they have used it, and some of them again
                unit.take_part()
            unit.held = False
            unit.end_forward(self.stays(unit), self.wants_gradients)
            return
        if in_backward and not unit.is_sharded and index not in self._prefetch.ahead:
            unit.release_after_forward(comes_back=True)  # this rank alone has kept it
        self._start(unit, walk)
        unit.finish_gather()
        if not in_backward:
            unit.end_forward(self.stays(unit), self.wants_gradients)
            return
        if index in self._ran and index not in walk.ran:
            # Its own backward is still to come here, in another order: where forwards run again,
            # the order depends on which units a rank has run.
            walk.held.add(index)
            return
        if unit.reshard_after_backward:
            unit.reshard()
        if not unit.awaits_backward:
            self._reductions.complete(unit.groups[::-1])

    def _take_turns(
        self,
        wanted: int,
        walk: Walk,
        has_run: bool = False,
        recomputes: bool = False,
        timeout_s: float | None = None,
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
            turn = agree_on_turn(mine, self._ranks, self._precedence(walk), timeout_s)
            if walk is self._backward:
                self._reductions.issue(turn.complete, turn.late)
            if turn.unit == END:
                self._reductions.again, self._has_skipped = turn.again, turn.skips
                self._ran_anywhere, self._has_failed = set(turn.ran), turn.failed
                if walk is self._forward:
                    self._release_held(walk)
                return
            walk.record(turn.unit, turn.recomputes)
            if turn.unit == wanted:
                return
            self._take_part(turn.unit, walk)

    def _release_held(self, walk: Walk) -> None:
        """Release what was unsharded by hand and has run on other ranks, as they have done."""
        for index in self._ran_anywhere - walk.ran.keys():
            unit = self._units[index]()
            if unit is not None and unit.held:
                unit.held = False
                unit.end_forward(self.stays(unit), self.wants_gradients)

    def _turn(self, wanted: int, walk: Walk, has_run: bool, recomputes: bool) -> Turn:
        """What to tell the other ranks."""
        step = self._step(walk)
        wrong = ""
        # What runs its forward again gathers in that order what the others may need before it.
        if wanted in walk.skipped and not has_run and not recomputes:
            *_, before, _ = walk.ran
            wrong = (
                f"rank {dist.get_rank()} runs {self._name(wanted)} after {self._name(before)} in "
                f"{step}, another rank before it"
            )
        complete = self._reductions.ready if walk is self._backward else []
        forward = self._forward if walk is self._forward else self._last_forward
        ran = list(forward.ran) if wanted == END else []
        late = self._reductions.late if walk is self._backward else []
        again = self._reductions.reduced_too_early if walk is self._backward else []
        failed = walk is self._forward and self._has_failed
        skips = self._has_skipped
        return Turn(step, wanted, recomputes, complete, late, again, ran, wrong, failed, skips)

    def _announce_turn(self, wanted: int, walk: Walk) -> None:
        """While recording, with units on several meshes: raise unless all want the same."""
        if wanted == END:
            self._announce(f"the end of {self._step(walk)}")
            return
        self._announce(
            f"the gather of {self._name(wanted)} in {self._step(walk)}", self._units[wanted]()
        )
        walk.record(wanted)

    def _catch_up(self, walk: Walk, timeout_s: float | None = None) -> None:
        """At the end of a pass: take part in what other ranks have run."""
        if walk is self._backward:
            self._reductions.complete_rest()
        if walk.is_recording:
            self._take_turns(END, walk, timeout_s=timeout_s)
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
            around = self._names.around(index)
            return around is None or around in known
        return self._names.is_like(index, known)  # a method for a part of the model

    def _may_come_back(self, index: int, _: set[int]) -> bool:
        """Whether a later backward may gather a unit that this one did not need."""
        unit = self._units[index]()
        if unit is None or self._last_forward.order.last(index) is None:
            return False
        is_kept = unit.keeps_after_forward(True) and not self._num_backwards  # the first frees it
        is_gathered = unit.unshard_in_backward and not is_kept
        # A frozen one that has run, and that no backward asked for: its inputs want no gradient.
        # They may where ranks leave out what comes before it.
        is_wanted = unit.trainable or self._has_skipped or index not in self._ran_anywhere
        return is_gathered and is_wanted

    def _announce(self, what: str, unit: Unit | None = None) -> None:
        """Compare the next step with the ranks that share it, through the store."""
        for axes in self._axes.values() if unit is None else (unit.groups[0].axes,):
            agree("next step", [what], axes.groups[0], _SAME_ORDER)

    def _precedence(self, walk: Walk) -> Callable[[Turn], list[int]]:
        """Which of several wishes is first: the lowest."""
        if walk is self._forward:
            return lambda turn: [turn.unit]
        return functools.partial(self._backward_precedence, self._last_forward.order, walk.order)

    def _backward_precedence(self, forward: Order, backward: Order, turn: Turn) -> list[int]:
        """Last is first, but in a unit whose forward runs again what comes first is first."""
        path = self._names.paths[turn.unit]
        places = [forward.last(unit) or 0 for unit in (*path, turn.unit)]
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

    def _say(self, when: str, walk: Walk) -> None:
        """Where this rank is, for errors."""
        waiting.enter(f"{when} {self._step(walk)} (pass {self.num_passes})")

    # Backward

    def begin_backward(self) -> None:
        """See that `_end_backward` runs when the backward that is running now has ended."""
        if self._has_broken_off:
            self._drop_step(MEETING_TIMEOUT_S)
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
                is_due = group.gradients.settle(not reduces) and reduces
                if is_due:
                    due.append(
                        Due(self._group_index[id(group)], group, unit, self._index[id(unit)])
                    )
        self._agree_on_frozen(due)
        due.reverse()
        indices = tuple(item.number for item in due)
        forwards, backwards = (
            min(self._num_forwards, _MAX_FORWARDS),
            min(self._num_backwards, _MAX_BACKWARDS),
        )
        kept = tuple(u.fqn for u in self.units() if u.keeps_after_forward(True))
        self._back_kind = (self._last_kind, forwards, backwards, indices, kept)
        order = None if self._always_records else self._back_orders.get(self._back_kind)
        self._backward = walk = Walk(order)
        self._say("in", walk)
        most = self.max_reductions if due else 1
        is_told = any(unit.max_reductions is not None for unit in self.units())
        most_at_end = max(most - 1, 0) if is_told else most  # what a user says holds to the end
        self._reductions = Reductions(
            due, walk, self._ran, self._can_settle, self.comm, most, most_at_end
        )
        self._reductions.is_told = is_told

    def _agree_on_frozen(self, due: list[Due]) -> None:
        """Compare what is frozen beside trainable parameters, as buffers are laid out by that.

        Cost: nothing while it is as in the backward before, else a round through the store.
        """
        changed: list[str] = []
        for item in due:
            wanted = item.group.gradients.wanted
            names = [] if all(wanted) else item.group.gradients.left_out
            if names != self._frozen.get(item.number, []):
                self._frozen[item.number] = names
                changed.append(f"unit {item.unit.fqn!r} without {names}")
        if changed:
            for axes in self._axes.values():
                for group in axes.groups:
                    agree_on_frozen(changed, group)

    def _no_reductions(self) -> Reductions:
        return Reductions([], self._backward, set(), self._can_settle, self.comm, 1, 1)

    def before_backward(self, unit: Unit) -> None:
        """Gather ``unit`` and start on the units whose backward comes after it."""
        self.begin_backward()
        for group in unit.groups:
            group.frees_before_backward = not unit.unshard_in_backward
            if not unit.unshard_in_backward:
                group.follow_flags()
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
            usages: list[tuple[list[Group], Usage]] = []
            self._reduce_rest()
            self._reductions.finish(lambda: usages.extend(self._usages()))
            for unit in self.units():
                unit.end_backward()
            self._publish(usages)
            hand_back()
        num_gathers = len(self._backward.order.gathers)
        order = self._finished(self._backward)
        # Of units that ranks have left out, and that run again: no other backward tells how often.
        has_skipped = bool(order.recomputed) and self._has_skipped
        is_unsure = has_skipped or len(order.gathers) > num_gathers
        if not (self._backward.is_recording and self._num_forwards > 1 and is_unsure):
            self._back_orders[self._back_kind] = order
        if not self._num_backwards:
            self._first_back[self._last_kind] = order
        self._num_backwards += 1
        self._say("after", self._backward)
        self._end, self._reductions = None, self._no_reductions()

    def _reduce_rest(self) -> None:
        """Find out what was reduced too early, and is to be reduced again at the end."""
        reductions = self._reductions
        if not self._backward.is_recording or not self._can_settle:
            # A second use that was not there before, on all ranks if they run the same.
            reductions.again = reductions.reduced_too_early
            if reductions.again and self._can_settle:
                names = [self._name(unit) for unit in reductions.units_of(reductions.again)]
                what = f"a second reduction of {', '.join(names)} in {self._step(self._backward)}"
                self._announce(what)
        if self._can_settle:
            self._backward.order.reduce_at_end(reductions.again)

    def _usages(self) -> Iterator[tuple[list[Group], Usage]]:
        """Start to ask which parameters were used, of the groups to be published on each mesh."""
        reduced = self._reductions.groups
        asks = self._unused != "zeros" and not self.units()[0].gives_zeros
        for key, axes in self._axes.items():
            here = [g for g in reduced if (g.axes.shard_ranks, g.axes.replica_ranks) == key]
            groups = [
                group for group in here if group.gradients.sums_replicas or axes.num_replicas == 1
            ]
            if groups:
                yield groups, Usage(groups, self.comm(groups[0]), asks=asks)

    def _publish(self, usages: list[tuple[list[Group], Usage]]) -> None:
        """Set the gradients of the sharded parameters."""
        for pool in {id(group.pool): group.pool for group in self._reductions.groups}.values():
            pool.trim()
        for groups, usage in usages:
            for group, flags in zip(groups, usage.finish(), strict=True):
                group.gradients.publish(flags)
                group.pool.lane.join()

    def reset(self) -> None:
        """Forget a step that was broken off by an exception. Its gradients are lost."""
        with plain_tensors():
            for unit in self.units():
                unit.reset()
        self._running, self._end, self._num_forwards = 0, None, 0
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
        if self._has_left:
            self._drop_step(timeout_s)
        else:
            self.reset()

    def _drop_step(self, timeout_s: float) -> None:
        """Drop a step that was broken off, when all ranks have, and have issued the same in it."""
        self._has_left = True
        try:
            if self._has_broken_off and self._backward.is_recording and self._can_settle:
                # Others may have come to units before the exception that this rank leaves out.
                with plain_tensors():
                    self._catch_up(self._backward, timeout_s)
            self._meet(timeout_s)
        except RankMismatchError:
            with contextlib.suppress(RankMismatchError):  # of what is under way
                self.reset()
            raise
        self.reset()

    def _meet(self, timeout_s: float) -> None:
        """Wait, through the store, until all ranks have left the step that this one has left.

        What is under way then ends on all of them, or nothing is waited for any more.
        """
        if self._always_records:  # the next gather is compared, and says more
            self._has_left = False
            return
        meet([(axes, comm_for(axes)) for axes in self._axes.values()], timeout_s)
        self._has_left = False


class _End:
    """Called by autograd when a backward has ended. It dies uncalled if the backward raises."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __call__(self) -> None:
        self._schedule._end_backward()
