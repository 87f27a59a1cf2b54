"""The order of collectives in a pass: recorded once, together with the other ranks, then walked.

A pass is one forward of the root (or of a unit that is called by itself), or one backward. All
ranks walk the same order, whatever they run of the model. A rank that skips a unit still takes
part in its gather, before its next one or at the end of the pass::

    order         embedding  block 0  block 1  block 2  head
    rank 0 runs   embedding  block 0           block 2  head
    rank 0 does   gather     gather   gather,  gather   gather
                                      release

Units may be skipped, on any rank in any pass. Without gradients a unit that runs a second time in a
pass on one rank runs a second time on all: what repeats (`generate`) may end earlier or later.

Indices of units and groups are places in lists that are the same on every rank.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator

__all__ = ["AT_THE_END", "Order", "Walk"]

AT_THE_END = 1 << 60  # a place after all gathers


class Order:
    """What every rank does in passes of one kind.

    Attributes:
        gathers: units, in the order of their gathers.
        reductions: groups, in the order of their reductions, each with its place: it is issued
            after so many gathers.
        recomputed: units that a backward gathers for running their forward again.
        written: units whose parameters a forward writes to before they run (a teacher's, in
            ``training_step``): they are not gathered ahead, and nothing beyond them is.
    """

    def __init__(self) -> None:
        self.gathers: list[int] = []
        self.reductions: list[tuple[int, int]] = []
        self.recomputed: set[int] = set()
        self.written: set[int] = set()
        self._places: dict[int, list[int]] = {}  # of each unit among the gathers

    def append(self, unit: int) -> None:
        """Add a gather at the end."""
        self._places.setdefault(unit, []).append(len(self.gathers))
        self.gathers.append(unit)

    def insert(self, place: int, unit: int) -> None:
        """Add a gather before the one at ``place``."""
        self.gathers.insert(place, unit)
        # Also what came right before it: it may be of a unit that contains this one.
        self.reductions = [(group, at + (at >= place)) for group, at in self.reductions]
        self._places = {}
        for at, each in enumerate(self.gathers):
            self._places.setdefault(each, []).append(at)

    def reduce_at_end(self, groups: Collection[int]) -> None:
        """Reduce these groups after all else: they get gradients after they seem complete."""
        if groups:
            before = [each for each in self.reductions if each[0] not in groups]
            self.reductions = [*before, *((group, AT_THE_END) for group in groups)]

    def find(self, unit: int, start: int) -> int | None:
        """The place of the first gather of ``unit`` at or after ``start``."""
        places = self._places.get(unit, [])
        at = bisect_left(places, start)
        return places[at] if at < len(places) else None

    def last(self, unit: int) -> int | None:
        """The place of the last gather of ``unit``."""
        return self._places[unit][-1] if unit in self._places else None


class Walk:
    """One pass along an order, or one that records it.

    Attributes:
        place: how many of the order's gathers lie behind.
        ran: the units that this rank has run in the pass, in order of their first runs.
        skipped: the units whose gathers it took part in for other ranks.
        held: those of them that stay gathered, since this rank has not come to them yet.
    """

    def __init__(self, order: Order | None) -> None:
        self.is_recording = order is None
        self.order = Order() if order is None else order
        self.place = 0
        self.ran: dict[int, None] = {}
        self.skipped: set[int] = set()
        self.held: set[int] = set()

    def record(self, unit: int, recomputes: bool = False) -> None:
        """The next gather is that of ``unit``."""
        self.order.append(unit)
        if recomputes:
            self.order.recomputed.add(unit)
        self.place = len(self.order.gathers)

    def insert(self, unit: int) -> None:
        """As `record`, in the middle of an order that did not have it."""
        self.order.insert(self.place, unit)
        self.place += 1

    def find(self, unit: int) -> int | None:
        """The place of the next gather of ``unit``; None if the order has none from here on."""
        return self.order.find(unit, self.place)

    def wrap(self, unit: int) -> None:
        """Go on after the first gather of ``unit``: it runs more often than in the recorded pass.

        What it repeats has lengths of its own (the tokens of ``generate``).
        """
        first = self.order.find(unit, 0)
        self.place = self.place if first is None else first + 1

    def skip_to(self, place: int, *, again: bool) -> Iterator[int]:
        """The units up to ``place``, moving past each: those not run in this pass, or all."""
        while self.place < place:
            unit = self.order.gathers[self.place]
            self.place += 1
            if again or unit not in self.ran:
                self.skipped.add(unit)
                yield unit

    @property
    def is_at_end(self) -> bool:
        """Whether no gather is expected any more."""
        return self.place >= len(self.order.gathers)

    def ahead(self) -> Iterable[int]:
        """The units whose gathers are expected next."""
        order = self.order
        upcoming = itertools.islice(order.gathers, self.place, None)
        return itertools.takewhile(lambda unit: unit not in order.written, upcoming)
