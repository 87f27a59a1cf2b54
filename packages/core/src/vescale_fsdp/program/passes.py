"""Passes: what one rank does in forwards and backwards, event by event.

A pass follows the program of its kind (`order`), the first time a prediction. Such a pass begins
when all ranks have come to it: nothing is sent before. If this rank skips a unit, it joins the
all-gather. If it runs a unit that is not in the program, all ranks agree on it when they are at the
program's end. At the end of a predicted pass the ranks exchange what they have used; that is the
program of later passes.

    rank 0  round  unshard 0, 1, 2, 3       round  ...  round  unshard 3, 2, 1  reduce  round
    rank 1  round  unshard 0, 1, join 2, 3  round  ...  round  unshard 3, 2, 1  reduce  round

Reductions are part of the program of a backward. All groups that can get a gradient are reduced in
every backward that synchronizes, as zeros where this rank has none.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.program.executor import Executor
from vescale_fsdp.program.order import Program, Walk
from vescale_fsdp.program.predict import (
    BackKind,
    Kind,
    Names,
    Since,
    backward_precedence,
    continued,
    fill,
    insert_by,
    predicted_backward,
    reduce_not_before,
)
from vescale_fsdp.program.record import CrossedError, Precedence, Record, merged, program_of
from vescale_fsdp.program.reductions import Reduction, Reductions
from vescale_fsdp.program.residency import Lease, Residency
from vescale_fsdp.program.window import Policy, Window

_MAX_REPEATS = 64  # that are predicted at a time of what repeats without gradients


class Passes:
    """The forwards and backwards of one model on one rank.

    Args:
        units: of the model, outermost first (``named_modules`` order). Held weakly.
        names: of the units.
        executor: carries out what is decided here.
        can_settle: whether all ranks that share a unit share all of them, and so can agree on what
            is next. If not, the first pass of a kind has to be the same on all ranks.
        predicts: whether passes are predicted, and confirmed once. If not, ranks agree before each
            all-gather of each pass.
        trusts: whether predictions count as confirmed (one rank is simulated for all).
    """

    def __init__(
        self,
        units: Sequence[Residency],
        names: Names,
        executor: Executor,
        policy: Policy,
        *,
        can_settle: bool,
        predicts: bool = True,
        trusts: bool = False,
    ) -> None:
        self._units = [weakref.ref(unit) for unit in units]
        for index, unit in enumerate(units):
            unit.index = index
        self._names, self._executor = names, executor
        self._can_settle, self._predicts, self._trusts = can_settle, predicts, trusts
        self.title, self.rank = "the model", 0  # in errors
        self.window = Window(self._units, policy)
        # Forward
        self.num_passes = 0
        self._num_repeats = 1  # that are predicted at the next round of what repeats
        self._num_filled = 0  # units that nobody ran, in what was confirmed last
        self._running = 0  # forwards of units that have begun and not ended
        self.has_failed = False  # whether the last pass has ended by an exception, on any rank
        self._kind: Kind = (0, "", False)
        self.method = ""  # that the outermost forward is a call of
        self.wants_gradients = False  # whether a backward may follow the forward that runs
        self._forwards: dict[Kind, Program] = {}
        self._forward = Walk(Program())
        self._versions: list[object] = []  # of the shards when a predicted pass began
        self._stays: set[int] = set()  # units that the backward would unshard first
        self._closed: dict[Kind, set[int]] = {}  # units whose inputs want no gradient
        self._visited: dict[Kind, set[int]] = {}  # units that a backward may come back to
        self._is_closed: set[int] = set()  # of the pass that runs, on this rank
        self._is_visited: set[int] = set()
        # Backward
        self._since = Since(self._units, names)
        self._back_kind: BackKind | None = None  # None: no backward, only its reductions
        self._backwards: dict[BackKind, Program] = {}
        self._first_back: dict[Kind, Program] = {}  # of the first backward after each forward
        self._backward = Walk(Program())
        self._reductions = self._no_reductions()

    def _alive(self) -> Iterator[Residency]:
        return (unit for ref in self._units if (unit := ref()) is not None)

    def _no_reductions(self) -> Reductions:
        nothing = self._executor.start_reductions
        return Reductions([], self._backward, None, nothing, None, 1, 1)

    def _step(self, walk: Walk) -> str:
        if walk is self._backward:
            return f"{'backward' if self._back_kind else 'finalization'} of {self.title}"
        first, method, wants_gradients = self._kind
        how = "" if wants_gradients else " without gradients"
        return f"{method} of {self._names.title(first)} of {self.title}{how}"

    def _say(self, when: str, walk: Walk) -> None:
        self._executor.enter(f"{when} {self._step(walk)} (pass {self.num_passes})")

    # Along a program, forward or backward

    def _unshard(self, unit: Residency, walk: Walk, recomputes: bool = False) -> None:
        """Unshard ``unit``, and prefetch the units after it in the program."""
        index, is_forward, program = unit.index, walk is self._forward, walk.program
        has_run = index in walk.ran
        walk.ran.setdefault(index)
        if is_forward and self.wants_gradients:
            self._since.ran.add(index)
        is_needed = unit.is_sharded or Lease.AHEAD in unit.leases
        if program.is_confirmed and is_needed and walk.comes_to(index):  # nearly always
            unit.leases.discard(Lease.HELD)
            if not is_forward:
                self._reductions.proceed()
            walk.place += 1
            self._start(unit, walk)
            unit.wait_for_unshard()
            return
        if not unit.sizes:  # it has no place in any program
            self._start(unit, walk)
            return
        is_held = Lease.HELD in unit.leases
        if recomputes and walk.is_predicted:  # also where it is there, and needs no all-gather
            walk.recomputed.add(index)
        unit.leases.discard(Lease.HELD)
        if is_forward and self._versions and self._versions[index] != unit.version:
            program.written.add(index)
        repeats = has_run and is_forward and not self.wants_gradients
        if not is_needed and (has_run or is_held or self._is_kept(unit, walk)):
            pass  # it is there: what the program has of it is for a later use
        elif (place := walk.find(index)) is not None:
            self._seek(place, walk)
            walk.place = place + 1
        elif not is_needed:
            pass
        elif walk.is_predicted:
            self._settle(index, walk, recomputes=recomputes)
        elif repeats:  # it has stayed, and may have been written to since
            unit.refresh()
            walk.wrap(index)
        elif (
            has_run and not is_forward
        ):  # once more than was confirmed: after all that other ranks may still want
            self._seek(len(program.unshards), walk)
            walk.insert(index)
        else:
            # All ranks may have gone another way. If only some have, the others do not come here.
            what = f"{self._names.title(index)}, which is new at place {walk.place}"
            self._executor.compare([f"{what} of {self._step(walk)}"], unit)
            unit.refresh()
            walk.insert(index)
            if is_forward:  # what backwards after it have confirmed is without this unit
                for kind in [kind for kind in self._backwards if kind[0] == self._kind]:
                    del self._backwards[kind]
        if is_needed or is_held or (not has_run and (is_forward or index in walk.joined)):
            walk.use(index)
        self._start(unit, walk)
        self._wait(unit, walk)

    def _is_kept(self, unit: Residency, walk: Walk) -> bool:
        """Whether a setting keeps it for the backward; programs do not contain that use."""
        by_hand = Lease.USER in unit.leases or Lease.PINNED in unit.leases
        return walk is self._backward and unit.keeps_after_forward(True) and not by_hand

    def _start(self, unit: Residency, walk: Walk) -> None:
        """Start the all-gather of ``unit``, and those that are to be under way beside it."""
        if walk is self._forward and unit.is_stale:
            # It was unsharded ahead, and then written to: on all ranks, if they run the same code.
            what = f"another gather of {self._names.title(unit.index)}, which was written to"
            self._executor.compare([f"{what} in {self._step(walk)}"], unit)
            unit.refresh()
            walk.program.written.add(unit.index)
        self.window.start(unit, walk, self._reductions if walk is self._backward else None)

    def _wait(self, unit: Residency, walk: Walk) -> None:
        if walk.is_predicted and self._can_settle:
            while not unit.has_arrived():
                if self._executor.is_elsewhere(self._step(walk)):  # and does not come here
                    self._say_together(Record(self._step(walk), rank=self.rank), walk)
        unit.wait_for_unshard()

    def _seek(self, place: int, walk: Walk) -> None:
        """Move to ``place``, and join the all-gathers before it, which only other ranks need."""
        again = walk.is_predicted or walk is self._backward or self.wants_gradients
        for index in walk.seek(place, again=again):
            self._join(index, walk)
        if walk is self._backward:
            self._reductions.proceed()

    def _join(self, index: int, walk: Walk, *, is_settled: bool = False) -> None:
        """Unshard a unit that this rank skips, for the others, and free it."""
        unit, in_backward = self._units[index](), walk is self._backward
        walk.joined.add(index)
        self._since.has_skipped = True
        if unit is None or not unit.sizes:
            return
        if in_backward and not (unit.unshard_in_backward or index in walk.program.recomputed):
            return
        if unit.is_busy and not unit.is_sharded:
            if in_backward or not unit.keeps_after_forward(self.wants_gradients):
                unit.join_unshard()  # else it is there on all ranks
            return
        if Lease.USER in unit.leases and not in_backward:  # by hand, on all ranks
            if is_settled:  # they have used it, and some of them again
                unit.join_unshard()
            self._end_forward_of(unit)
            return
        if in_backward and not unit.is_sharded and Lease.AHEAD not in unit.leases:
            unit.release(to_part=True)  # this rank alone has kept it
        self._start(unit, walk)
        if in_backward:  # also to say, before this rank waits, that it is behind
            self._reductions.proceed()
        self._wait(unit, walk)
        if not in_backward:
            self._end_forward_of(unit)
        elif (
            index in self._since.ran
            and index not in walk.ran
            and not self._since.gets_nothing(unit, self._backward)
        ):
            # Its own backward is still to come here, in another order: where forwards run again,
            # the order depends on which units a rank has run.
            unit.leases.add(Lease.HELD)
        else:
            if unit.reshard_after_backward:
                unit.release_after_backward()
            if not unit.awaits_backward:
                self._reductions.complete(unit, has_run=False)

    def stays(self, unit: Residency) -> bool:
        """Whether a unit that has run in the forward under way stays unsharded for the backward.

        As it was told to, or because the backward would unshard it again at once: then it counts as
        unsharded ahead. The same on all ranks, whatever they have run: where they can settle a
        program, and not in a recomputation, which only some may make.
        """
        if unit.keeps_after_forward(self.wants_gradients):
            return True
        if unit.index not in self._stays or not unit.unshard_in_backward:
            return False
        if self._forward.find(unit.index) is not None:  # it runs again in this forward
            return False
        unit.leases.add(Lease.AHEAD)
        return True

    def _end_forward_of(self, unit: Residency) -> None:
        """End the forward of a unit that only other ranks have run."""
        unit.leases.discard(Lease.USER)
        unit.end_forward(self.stays(unit), self.wants_gradients)

    # Predictions that do not hold, and what the ranks make of them

    def _settle(
        self,
        wanted: int | None,
        walk: Walk,
        *,
        recomputes: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Agree on a unit that was not predicted; first join those that other ranks need before it.

        Args:
            wanted: the unit that this rank needs; None: it runs no more in this pass.
            recomputes: whether for running its forward again.
        """
        while True:
            place = None if wanted is None else walk.find(wanted)
            self._seek(len(walk.program.unshards) if place is None else place, walk)
            if place is not None:
                walk.place = place + 1
                return
            mine = self._record(walk, wanted)
            if wanted is not None:
                mine.wants = [(wanted, recomputes)]
            said = self._say_together(mine, walk, timeout_s)
            if not said.wants:
                self._confirm(said, walk)
                return
            walk.program.recomputed.update(unit for unit, again in said.wants if again)
            precedence = self._precedence(walk)
            unit = min((unit for unit, _ in said.wants), key=precedence)
            walk.program.append(unit)
            walk.place += 1
            if walk is self._forward and self._predicts:
                for each in self._continued(unit, said):
                    walk.program.append(each)
            if unit == wanted:
                return
            self._join(unit, walk, is_settled=True)

    def _continued(self, unit: int, said: Record) -> list[int]:
        """Predict the units after ``unit``, which was not predicted here."""
        so_far = merged(said.used, lambda each: [each], holds=True)[0]
        if unit not in so_far:
            return continued(self._names, self._kind[0], unit, {*said.ran})
        again = so_far[so_far.index(unit) :]
        if self.wants_gradients:
            return again[1:]
        # The tokens of `generate`: some more at each round, for few rounds.
        self._num_repeats = min(2 * self._num_repeats, _MAX_REPEATS)
        return (again * self._num_repeats)[1:]

    def _say_together(self, mine: Record, walk: Walk, timeout_s: float | None = None) -> Record:
        is_evaluation = walk is self._forward and not self.wants_gradients
        if is_evaluation and not self._executor.sends_gathers:
            return mine  # it sends nothing: a rank may run it alone
        if self._can_settle:
            return self._executor.settle(mine, timeout_s)
        # With units on several meshes: all ranks have to use and want the same.
        if mine.wants:
            ((wanted, _),) = mine.wants
            what = f"the gather of {self._names.title(wanted)} in {mine.step}"
            self._executor.compare([what], self._units[wanted]())
        else:
            used = [unit for each, _, _ in mine.used for unit in each]
            entries = [f"{self._names.title(unit)} in {mine.step}" for unit in used]
            place = f"the {'end' if mine.used else 'beginning'} of {mine.step}"
            self._executor.compare([*entries, place], None)
        return mine

    def _record(self, walk: Walk, wanted: int | None) -> Record:
        """Return this rank's record for the other ranks."""
        step = self._step(walk)
        if walk is self._forward:
            said = Record(step, used=[(walk.used, [], self.rank)], failed=self.has_failed)
            said.ran = [unit for unit in walk.ran if unit != wanted or unit in walk.used]
            said.closed, said.visited = list(self._is_closed), list(self._is_visited)
        else:
            reductions = self._reductions
            said = Record(step, used=[(walk.used, reductions.completed, self.rank)])
            said.late, said.again = reductions.late, reductions.reduced_too_early
            said.ran = list(self._since.forward.ran)
        said.recomputed, said.written = list(walk.recomputed), list(walk.program.written)
        said.skips, said.rank = self._since.has_skipped, self.rank
        return said

    def _confirm(self, said: Record, walk: Walk) -> None:
        """Make the program for passes of this kind from the merged record."""
        in_backward = walk is self._backward
        self._reductions.again, self._since.has_skipped = said.again, said.skips
        self._since.ran_anywhere, self.has_failed = set(said.ran), said.failed
        due = [item.number for item in self._reductions.due] if in_backward else []
        walk.program.recomputed.update(said.recomputed)
        try:
            program = program_of(said, due, self._precedence(walk), holds=in_backward)
        except CrossedError as error:
            first, second = map(self._names.title, error.units)
            one, other = error.ranks
            raise RankMismatchError(
                f"ranks disagree about the next step: rank {other} runs {first} after {second} in "
                f"{said.step}, rank {one} before it. Run the same passes with the same order of "
                "units on every rank; a rank may leave units out"
            ) from None
        if self._can_settle:
            if in_backward:
                units = filter(
                    self._since.may_come_back, dict.fromkeys(self._since.forward.program.unshards)
                )
                precedence = self._precedence(walk)
                insert_by(precedence, program, units)
                unit_of = {item.number: item.unit.index for item in self._reductions.due}
                forward = self._since.forward.program
                reduce_not_before(precedence, program, unit_of, self._names, forward)
            else:
                self._release_used_elsewhere(walk)
                by_path = self.method == "forward" or self.wants_gradients
                may_run = partial(self._since.may_run, by_path=by_path)
                fill(program, self._names, may_run)
        elif in_backward:
            program.reductions = [(number, 0) for number in due]
        self._num_filled = len(program.unshards) - len(set(said.used[0][0]))
        walk.program, walk.place = program, len(program.unshards)
        if not in_backward:
            self._closed[self._kind] = set(said.closed)
            self._visited[self._kind] = set(said.visited)

    def _release_used_elsewhere(self, walk: Walk) -> None:
        """Free units that were unsharded by hand here and have run on other ranks."""
        for index in self._since.ran_anywhere - walk.ran.keys():
            unit = self._units[index]()
            if unit is not None and Lease.USER in unit.leases:
                self._end_forward_of(unit)

    def _catch_up(self, walk: Walk, timeout_s: float | None = None) -> None:
        """Join what other ranks have run, at the end of a pass."""
        if walk is self._backward:
            self._reductions.complete_rest()
        if walk.is_predicted:
            self._settle(None, walk, timeout_s=timeout_s)
        else:
            self._seek(len(walk.program.unshards), walk)

    def _precedence(self, walk: Walk) -> Precedence:
        """Return the order of units that several ranks need: the lowest is first."""
        if walk is self._forward:
            return lambda unit: [unit]
        recomputed = self._names.like(walk.program.recomputed)
        return backward_precedence(self._names, self._since.forward.program, recomputed)

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward is under way."""
        return self._running > 0

    @property
    def is_open(self) -> bool:
        """Whether a forward has run, and awaits its backward."""
        return self.wants_gradients and bool(self._forward.ran) and not self._since.num_backwards

    @property
    def reductions(self) -> Reductions:
        """Those of the backward that runs."""
        return self._reductions

    # Forward

    def before_forward(self, unit: Residency, method: str, wants_gradients: bool) -> None:
        """Unshard ``unit``, of which ``method`` begins, and start on the units after it."""
        if self._running == 0:
            self._begin_pass(unit, method, wants_gradients)
        self._unshard(unit, self._forward)
        self._running += 1

    def recompute(self, unit: Residency) -> None:
        """Unshard ``unit``, whose forward runs again in a backward."""
        self._unshard(unit, self._backward, recomputes=True)

    def after_forward(
        self,
        unit: Residency,
        *,
        has_more: bool = False,
        strays: bool = False,
        has_failed: bool = False,
        is_closed: bool = False,
        is_visited: bool = True,
        is_hidden: bool = False,
    ) -> None:
        """The forward of a unit has ended, perhaps by an exception.

        Args:
            has_more: whether other modules of the unit are still to run.
            strays: whether it may get gradients in a way that the graph does not show.
            is_closed: whether its inputs need no gradient, but its parameters do.
            is_visited: whether a backward may come back through its outputs.
            is_hidden: whether it may do so without a call in the graph: a checkpoint runs the
                forward again, or gradients bypass the outputs.
        """
        if is_hidden:
            self._since.hidden.add(unit.index)
        if is_closed:
            self._is_closed.add(unit.index)
        if is_visited or is_hidden:
            self._is_visited.add(unit.index)
        unit.end_forward(has_more or self.stays(unit) or strays, self.wants_gradients)
        self._running = max(self._running - 1, 0)
        if self._running == 0:
            self._end_pass(has_failed)

    def _begin_pass(self, first: Residency, method: str, wants_gradients: bool) -> None:
        for unit in self._alive():
            unit.begin_pass()
        self.window.forget()
        self._kind = (first.index, method, wants_gradients)
        self.method, self.wants_gradients = method, wants_gradients
        self.num_passes += 1
        self._say("in", self._forward)
        self._forward = Walk(self._program_of_forward())
        self._begin_walk(self._forward)
        self._executor.begin_pass(first)
        self._is_closed, self._is_visited, self._num_repeats = set(), set(), 1
        back = self._first_back.get(self._kind)
        is_known = back is not None and self._can_settle and not self._forward.is_predicted
        coming = dict.fromkeys(back.unshards) if back is not None and is_known else {}
        self._stays = set(itertools.islice(coming, self.window.policy.stays))
        is_new = self._forward.is_predicted
        units = (ref() for ref in self._units)
        self._versions = [u.version if u is not None else None for u in units] if is_new else []
        if wants_gradients:
            self._since.begin_forward(self._kind, self._forward)

    def _begin_walk(self, walk: Walk) -> None:
        if walk.is_predicted and self._predicts:
            # Others may be in a pass that they know, whose messages would be taken for ours.
            self._say_together(Record(self._step(walk), rank=self.rank), walk)
        elif not walk.is_predicted and self._can_settle:
            self._executor.begin_walk(walk.program, in_backward=walk is self._backward)

    def _program_of_forward(self) -> Program:
        if not self._predicts:
            return Program()
        known = self._forwards.get(self._kind)
        if known is not None:
            return known
        first, method, _ = self._kind
        like = [kind for kind in self._forwards if kind[0] == first]
        like.sort(key=lambda kind: (kind[1] != method, not kind[2]))
        if not like:
            return Program(self._names.within(first), is_confirmed=self._trusts)
        before = self._forwards[like[0]].unshards
        return Program(before if like[0][2] else dict.fromkeys(before))  # once, of many tokens

    def _end_pass(self, has_failed: bool) -> None:
        for unit in self._alive():
            if unit.end_modules():
                unit.end_forward(self.stays(unit), self.wants_gradients)
        self._say("after", self._forward)
        self.has_failed = has_failed
        if isinstance(sys.exception(), RankMismatchError):
            return  # there is no program to follow
        if has_failed:  # elsewhere, perhaps: other ranks wait for us until they get there
            with contextlib.suppress(Exception):  # the one that is on its way says more
                self._catch_up(self._forward)
                self._executor.end_walk()
        else:
            self._catch_up(self._forward)
            self._executor.end_walk()
        if self._trusts:
            self._closed[self._kind], self._visited[self._kind] = self._is_closed, self._is_visited
        if not self.has_failed:
            self._forwards[self._kind] = self._forward.program
        self.window.drop(but=() if has_failed else self._stays)
        if not self.wants_gradients:
            self._executor.end_pass()

    @property
    def step_of_backward(self) -> str:
        """The backward that runs, in words."""
        return self._step(self._backward)

    # Backward

    def begin_backward(self) -> None:
        """Choose the program of the backward that begins."""
        due = self._executor.due()
        self._back_kind = self._since.kind_of_backward(tuple(item.number for item in due))
        program = self._backwards.get(self._back_kind) if self._predicts else None
        self._start_backward(due, program or self._program_of_backward(due))

    def begin_finalization(self, due: Sequence[Reduction]) -> None:
        """Begin to reduce ``due``, of which backwards have left the gradients.

        Like a backward that has nothing else to do. So all ranks know its program.
        """
        self._back_kind = None
        program = Program(is_confirmed=self._predicts)
        program.reductions = [(item.number, 0) for item in due]
        self._start_backward(due, program)

    def _start_backward(self, due: Sequence[Reduction], program: Program) -> None:
        self._backward = walk = Walk(program)
        self._say("in", walk)
        policy = self.window.policy
        self._begin_walk(walk)
        may_stall = walk.is_predicted and self._can_settle

        def gets_nothing(unit: Residency) -> bool:
            return self._since.gets_nothing(unit, walk)

        self._reductions = Reductions(
            due,
            walk,
            gets_nothing if self._can_settle else None,
            self._executor.start_reductions,
            self._executor.stall if may_stall else None,
            policy.reductions if due else 1,
            policy.reductions_at_end if due else 1,
        )

    def _program_of_backward(self, due: Sequence[Reduction]) -> Program:
        forward = self._since.forward.program if self._predicts else Program()
        groups = [(item.number, item.unit.index) for item in due]
        closed = self._closed.get(self._since.kind, set())
        visited = self._visited.get(self._since.kind)

        def comes_back(unit: int) -> bool:
            return self._since.comes_back(unit, visited)

        program = predicted_backward(self._names, forward, comes_back, groups, closed)
        if not self._can_settle:
            program.reductions = [(group, 0) for group, _ in groups]
        program.is_confirmed = self._trusts
        return program

    def before_backward(self, unit: Residency) -> None:
        """Unshard ``unit`` and start on the units whose backward comes after it."""
        if unit.unshard_in_backward:
            self._unshard(unit, self._backward)

    def take_turn(self) -> None:
        """Prefetch or wait for a reduction: half of a unit's gradients are there."""
        self.window.take_turn(self._backward, self._reductions)

    def after_backward(self, unit: Residency) -> None:
        """Free ``unit`` and reduce its gradients."""
        if unit.reshard_after_backward and not unit.lasts:
            unit.release_after_backward()
        self._reductions.complete(unit)

    def end_backward(self) -> None:
        """Reduce what is left, and record the program of the backward that has ended."""
        self.issue_reductions()
        self.finish_reductions()

    def issue_reductions(self) -> None:
        """Issue what is left to reduce, reshard, and record the program of the backward."""
        for unit in self._alive():  # before their gradients are copied
            unit.release_open()
        self._num_filled, walk = 0, self._backward
        was_predicted = walk.is_predicted
        self._catch_up(walk)
        self._executor.end_walk()
        self.window.drop()
        self._reduce_rest(was_predicted)
        self._reductions.issue_rest()
        self._executor.all_issued()
        for unit in self._alive():
            unit.end_backward()
        if self._back_kind is None:
            return
        # Of units that ranks have left out, and that run again: no other backward tells how often.
        program = walk.program
        is_unsure = self._num_filled > 0 or (bool(program.recomputed) and self._since.has_skipped)
        if not (was_predicted and self._since.num_forwards > 1 and is_unsure):
            self._backwards[self._back_kind] = program
        if not self._since.num_backwards:
            self._first_back[self._since.kind] = program
        self._since.num_backwards += 1

    def finish_reductions(self) -> None:
        """Wait for the reductions, and set the gradients."""
        self._reductions.finish()
        self._executor.end_backward()
        self._say("after", self._backward)
        self._reductions = self._no_reductions()

    def _reduce_rest(self, was_predicted: bool) -> None:
        """Find groups that were reduced too early, and reduce them again at the end."""
        reductions = self._reductions
        if not was_predicted or not self._can_settle:
            # A second use that was not there before, on all ranks if they run the same.
            reductions.again = reductions.reduced_too_early
            if reductions.again and self._can_settle:
                names = [self._names.title(unit) for unit in reductions.units_of(reductions.again)]
                what = f"a second reduction of {', '.join(names)} in {self._step(self._backward)}"
                self._executor.compare([what], None)
        if self._can_settle:
            self._backward.program.reduce_at_end(reductions.again)

    def catch_up_backward(self, timeout_s: float) -> None:
        """Join what other ranks ran of a backward that raised on this rank."""
        if self._backward.is_predicted and self._can_settle:
            self._catch_up(self._backward, timeout_s)

    def forget(self) -> None:
        """Forget a step that was broken off. Its gradients are lost."""
        self._running = 0
        self._since.forget()
        self._executor.end_walk()
        self.window.drop()
        self._forward, self._backward = Walk(Program()), Walk(Program())
        self._reductions = self._no_reductions()
