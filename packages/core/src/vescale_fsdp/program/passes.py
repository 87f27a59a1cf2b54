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
from collections.abc import Sequence

from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.program.order import Program, Walk
from vescale_fsdp.program.predict import predicted_backward
from vescale_fsdp.program.record import Record
from vescale_fsdp.program.reductions import Reduction, Reductions
from vescale_fsdp.program.residency import Residency
from vescale_fsdp.program.walking import Walking


class Passes(Walking):
    """The forwards and backwards of one model on one rank. Arguments are those of `Walking`."""

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
        if self._running == 0:
            self._executor.gathered_for(unit)
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
        indices = tuple(item.number for item in due)
        self._back_kind = self._since.kind_of_backward(indices)
        program = self._backwards.get(self._back_kind) if self._predicts else None
        self._backward = walk = Walk(program or self._program_of_backward(due))
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
        if unit.reshard_after_backward:
            unit.release_after_backward()
        self._reductions.complete(unit)

    def end_backward(self) -> None:
        """Reduce what is left, and record the program of the backward that has ended."""
        for unit in self._alive():  # before their gradients are copied
            unit.release_open()
        self._num_filled, walk = 0, self._backward
        was_predicted = walk.is_predicted
        self._catch_up(walk)
        self._executor.end_walk()
        self.window.drop()
        self._reduce_rest(was_predicted)
        self._reductions.finish(self._executor.all_issued)
        for unit in self._alive():
            unit.end_backward()
        self._executor.end_backward()
        # Of units that ranks have left out, and that run again: no other backward tells how often.
        program = walk.program
        is_unsure = self._num_filled > 0 or (bool(program.recomputed) and self._since.has_skipped)
        if not (was_predicted and self._since.num_forwards > 1 and is_unsure):
            self._backwards[self._back_kind] = program
        if not self._since.num_backwards:
            self._first_back[self._since.kind] = program
        self._since.num_backwards += 1
        self._say("after", walk)
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
