"""The program of a pass: the collectives of all ranks in one order; and a rank's position in it.

A pass is one forward of the root (or of a unit that is called by itself), or one backward. All
ranks walk the same program, whatever they run of the model. A rank that skips a unit still takes
part in its all-gather, before its next one or at the end of the pass::

    program       embedding  block 0  block 1  block 2  head
    rank 0 runs   embedding  block 0           block 2  head
    rank 0 does   unshard    unshard  unshard, unshard  unshard
                                      reshard

Units may be skipped, on any rank in any pass. Without gradients, if a unit runs a second time in a
pass on one rank, it does so on all; repetitions (`generate`) may end earlier or later.

Indices of units and groups are places in lists that are the same on every rank.

Bundles. A collective takes about 0.3 ms of processor time, whatever its size. So all-gathers of
small units (`window.Policy.small_bytes`) that follow each other in a confirmed program are sent in
one message, when the first of them runs; the others take their part of it when they run. Reductions
are sent in one message when the last is complete::

    program     unshard a   unshard b   unshard c   unshard d        a, b, c are small
    sends       a, b and c                          d

Which units form a bundle follows from the program and from sizes, so it is the same on all ranks. A
part that is out of date when it is needed (its parameters were written to since) is sent again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import NamedTuple, TypeVar

AT_THE_END = 1 << 60  # a place after all all-gathers


class Program:
    """The collectives that every rank issues in passes of one kind.

    Attributes:
        unshards: units, in the order of their all-gathers.
        reductions: groups, in the order of their reductions, each with its place: it is issued
            after that many all-gathers.
        recomputed: units that a backward unshards for running their forward again.
        written: units whose parameters a forward writes to before they run (a teacher's, in
            ``training_step``): they are not unsharded ahead, and nothing beyond them is.
        is_confirmed: whether the ranks have exchanged what they ran; else it is a prediction.
    """

    def __init__(self, unshards: Iterable[int] = (), *, is_confirmed: bool = False) -> None:
        self.unshards: list[int] = []
        self.reductions: list[tuple[int, int]] = []
        self.recomputed: set[int] = set()
        self.written: set[int] = set()
        self.is_confirmed = is_confirmed
        self._places: dict[int, list[int]] = {}  # of each unit among the all-gathers
        for unit in unshards:
            self.append(unit)

    def append(self, unit: int) -> None:
        """Add an all-gather at the end."""
        self._places.setdefault(unit, []).append(len(self.unshards))
        self.unshards.append(unit)

    def insert(self, place: int, unit: int) -> None:
        """Add an all-gather before the one at ``place``."""
        self.unshards.insert(place, unit)
        # Also what came right before it: it may be of a unit that contains this one.
        self.reductions = [(group, at + (at >= place)) for group, at in self.reductions]
        self._places = {}
        for at, each in enumerate(self.unshards):
            self._places.setdefault(each, []).append(at)

    def reduce_at_end(self, groups: Collection[int]) -> None:
        """Reduce these groups last: they get gradients after they seem complete."""
        if groups:
            before = [each for each in self.reductions if each[0] not in groups]
            self.reductions = [*before, *((group, AT_THE_END) for group in groups)]

    def find(self, unit: int, start: int) -> int | None:
        """The place of the first all-gather of ``unit`` at or after ``start``."""
        places = self._places.get(unit, [])
        at = bisect_left(places, start)
        return places[at] if at < len(places) else None

    def last(self, unit: int) -> int | None:
        """The place of the last all-gather of ``unit``."""
        return self._places[unit][-1] if unit in self._places else None


class Walk:
    """One pass along a program, on one rank.

    Attributes:
        place: how many of the program's all-gathers are done.
        ran: the units that this rank has run in the pass, in order of their first runs.
        used: the all-gathers that it needed itself, in order, while the program is a prediction.
        joined: the units whose all-gathers it took part in for other ranks.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.place = 0
        self.ran: dict[int, None] = {}
        self.used: list[int] = []
        self.recomputed: set[int] = set()
        self.joined: set[int] = set()

    @property
    def is_predicted(self) -> bool:
        """Whether the ranks have not yet exchanged what they run in such passes."""
        return not self.program.is_confirmed

    def use(self, unit: int) -> None:
        """Record that this rank needs ``unit`` now; all ranks' records make the next program."""
        if self.is_predicted:
            self.used.append(unit)

    def comes_to(self, unit: int) -> bool:
        """Whether the next all-gather is that of ``unit``."""
        unshards = self.program.unshards
        return self.place < len(unshards) and unshards[self.place] == unit

    def insert(self, unit: int) -> None:
        """Insert the all-gather of ``unit`` here, as the next one."""
        self.program.insert(self.place, unit)
        self.place += 1

    def find(self, unit: int) -> int | None:
        """The place of the next all-gather of ``unit``; None if there is none from here on."""
        return self.program.find(unit, self.place)

    def wrap(self, unit: int) -> None:
        """Go on after the first all-gather of ``unit``: it runs more often than was confirmed.

        The number of repetitions differs from pass to pass (the tokens of ``generate``).
        """
        first = self.program.find(unit, 0)
        self.place = self.place if first is None else first + 1

    def seek(self, place: int, *, again: bool) -> Iterator[int]:
        """The units to join up to ``place``, moving past each: those not run yet, or all."""
        while self.place < place:
            unit = self.program.unshards[self.place]
            self.place += 1
            if again or unit not in self.ran:
                self.joined.add(unit)
                yield unit

    @property
    def is_at_end(self) -> bool:
        """Whether no all-gather is expected any more."""
        return self.place >= len(self.program.unshards)

    def ahead(self) -> Iterable[int]:
        """The units whose all-gathers are expected next."""
        program = self.program
        upcoming = map(program.unshards.__getitem__, range(self.place, len(program.unshards)))
        if not program.written:
            return upcoming
        return itertools.takewhile(lambda unit: unit not in program.written, upcoming)


MOST_BYTES = 1 << 16  # of one message, for each rank of up to `_FEW_RANKS`
_FEW_RANKS = 8  # with more, a message holds so much less for each: all of it lies in memory

T = TypeVar("T", bound=Hashable)


class Sendable(NamedTuple):
    """A small message part: its bytes for each rank of a few (see `sendable_if_small`), and a kind
    that is equal within a message.
    """

    num_bytes: int
    kind: Hashable


def sendable_if_small(
    num_bytes: int, num_ranks: int, kind: Hashable, small_bytes: float
) -> Sendable | None:
    """Return a part of a message, or None for one that is sent alone.

    Args:
        num_bytes: that it has for each of ``num_ranks``.
        small_bytes: that are small, for each rank of a few.
    """
    weighed = num_bytes * max(num_ranks, _FEW_RANKS) // _FEW_RANKS
    return Sendable(weighed, kind) if 0 < weighed <= small_bytes else None


def bundled(items: Iterable[T], sendable_of: Callable[[T], Sendable | None]) -> list[list[T]]:
    """Return runs of two and more neighbours that are sent together; of repeated ones the first.

    Args:
        sendable_of: None for an item that must be sent alone.
    """
    found: list[list[T]] = []
    run: list[T] = []
    seen: set[T] = set()
    kind: Hashable = None
    num_bytes = 0
    for item in items:
        sendable = None if item in seen else sendable_of(item)
        seen.add(item)
        if sendable is None:
            found.append(run)
            run, num_bytes = [], 0
            continue
        if run and (sendable.kind != kind or num_bytes + sendable.num_bytes > MOST_BYTES):
            found.append(run)
            run, num_bytes = [], 0
        run.append(item)
        kind, num_bytes = sendable.kind, num_bytes + sendable.num_bytes
    return [each for each in (*found, run) if len(each) > 1]


class Bundles:
    """The all-gathers of one pass, as they are sent.

    Args:
        program: of the pass, confirmed.
        sendable_of: of each unit.
    """

    def __init__(self, program: Program, sendable_of: Callable[[int], Sendable | None]) -> None:
        def unless_written(unit: int) -> Sendable | None:
            return None if unit in program.written else sendable_of(unit)

        self._bundle_of = {
            unit: bundle for bundle in bundled(program.unshards, unless_written) for unit in bundle
        }
        self._sent: set[int] = set()

    def send_with(self, unit: int) -> list[int] | None:
        """Return the units to send now with ``unit``, itself the first.

        Empty if it was sent with others before; None if it must be sent alone.
        """
        bundle = self._bundle_of.pop(unit, None)
        if bundle is None:
            return None
        if unit in self._sent:
            return []
        after = bundle[bundle.index(unit) + 1 :]
        others = [each for each in after if each in self._bundle_of and each not in self._sent]
        self._sent.update(others)
        return [unit, *others] if others else None
