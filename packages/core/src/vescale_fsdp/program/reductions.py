"""The reductions of one backward, in the order that all ranks have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from vescale_fsdp.program.order import AT_THE_END, Sendable, Walk, bundled
from vescale_fsdp.program.residency import Residency


class Reduction(ABC):
    """A group of parameters that is to be reduced in a backward.

    Attributes:
        number: of the group, the same on all ranks.
        unit: that it is of.
    """

    number: int
    unit: Residency
    sendable: Sendable | None = None  # what is sent, if it may be with others

    @property
    @abstractmethod
    def has_gradients(self) -> bool:
        """Whether gradients were added that no reduction has sent yet."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the reduction that is under way."""

    @abstractmethod
    def has_arrived(self) -> bool:
        """Whether it has ended; waits, but not once a rank has said that it is behind (`stall`)."""


class Reductions:
    """Issues the reductions of one backward, and waits for them.

    A group is reduced when all of its gradients are there, the groups before it have been issued,
    and as many all-gathers lie behind as its place in the program says. The last keeps ranks that
    skip units from waiting for each other in a circle (docs/design/engine.md).

    While the program is a prediction a group may be complete later than that says. No rank waits
    then for a reduction that another cannot issue yet: that rank says so by ``stall``.

    Args:
        due: the groups to reduce.
        queue: the groups and their places, in order; it may change while the backward runs.
        walk: the backward.
        gets_nothing: whether no gradient of a unit can come any more on this rank. None: that is
            not asked, and only the end of the backward completes such a unit.
        start: issues the reductions of these groups together.
        stall: tells the other ranks that this one is behind.
        most: how many may be under way while gradients of another group appear. 0: each is waited
            for at once.
        most_at_end: how many may be under way while another group is copied when the backward has
            ended: its parameters are resharded by then, which leaves memory for one more.
    """

    def __init__(
        self,
        due: Sequence[Reduction],
        walk: Walk,
        gets_nothing: Callable[[Residency], bool] | None,
        start: Callable[[Sequence[Reduction]], None],
        stall: Callable[[], None] | None,
        most: int,
        most_at_end: int,
    ) -> None:
        self._due = {item.number: item for item in due}
        self._of_unit: dict[int, list[Reduction]] = {}
        for item in due:
            self._of_unit.setdefault(item.unit.index, []).append(item)
        self._walk, self._issues, self._stall = walk, start, stall
        self._gets_nothing = gets_nothing
        self._most, self._most_at_end = most, most_at_end
        self._num_issued = 0  # of the program's reductions
        self._complete: set[int] = set()
        self._counts: dict[int, int] = {}  # of those that have run: after how many of `Walk.used`
        self._issued: set[int] = set()
        self._flying: deque[Sequence[Reduction]] = deque()
        self.late: list[int] = []  # those that only the end of the backward completes
        self.again: list[int] = []  # to be reduced once more at the end, the same on all ranks
        self._has_ended = self._is_behind = False
        self._bundle_of: dict[int, list[int]] = {}  # those that are sent together
        self._is_predicted = walk.is_predicted
        if due and not walk.is_predicted:
            queue = [number for number, at in walk.program.reductions if at < AT_THE_END]
            for bundle in self._bundled(queue):
                self._bundle_of.update(dict.fromkeys(bundle, bundle))

    @property
    def due(self) -> Iterable[Reduction]:
        """All that are to be reduced."""
        return self._due.values()

    @property
    def reduced_too_early(self) -> list[int]:
        """The groups that were issued, and have got gradients since: they ran once more."""
        return [n for n, item in self._due.items() if n in self._issued and item.has_gradients]

    @property
    def completed(self) -> list[tuple[int, int]]:
        """The groups that this rank has run and completed, each after how many of `Walk.used`."""
        return list(self._counts.items())

    def units_of(self, numbers: Iterable[int]) -> list[int]:
        """The units that have these groups."""
        return list(dict.fromkeys(self._due[number].unit.index for number in numbers))

    def complete(self, unit: Residency, *, has_run: bool = True) -> None:
        """The groups of a unit have all of their gradients."""
        for item in self._of_unit.get(unit.index, ()):
            self._complete.add(item.number)
            if has_run:
                self._counts.setdefault(item.number, len(self._walk.used))
        self.proceed()

    def complete_rest(self) -> None:
        """The backward has ended on this rank: no more gradients come."""
        self._has_ended = True
        missing = [number for number in self._due if number not in self._complete]
        self.late = [number for number in missing if not self._gets_nothing_of(self._due[number])]
        self._complete.update(missing)
        self.proceed()

    def proceed(self) -> None:
        """Issue what only waited for its place. To be called after each move of the walk."""
        ready: list[list[Reduction]] = []
        queue, place = self._walk.program.reductions, self._walk.place
        while self._num_issued < len(queue):
            first = queue[self._num_issued][0]
            bundle = self._bundle_of.get(first, [first])
            end = self._num_issued + len(bundle)
            if queue[end - 1][1] > place:
                break
            items = [self._due[number] for number in bundle]
            if not all(i.number in self._complete or self._gets_nothing_of(i) for i in items):
                if self._stall is not None and not self._is_behind:
                    self._is_behind = True
                    self._stall()
                break
            self._num_issued = end
            ready.append(items)
        self._issue(ready)

    def issue_rest(self) -> None:
        """Issue what is left. Without streams it waits for all but the last of them."""
        rest = [number for number in self._due if number not in self._issued]
        together = [] if self._is_predicted else self._bundled(rest)
        bundle_of = {number: bundle for bundle in together for number in bundle}
        for number in rest:
            if number not in self._issued:
                bundle = bundle_of.get(number, [number])
                self._issue([[self._due[each] for each in bundle]])

    def finish(self) -> None:
        """Wait for everything."""
        self._stall = None
        self.land(0)
        for number, item in self._due.items():  # gradients that came after it seemed complete
            if number in self.again:
                self._start([item])
        self.land(0)

    def _bundled(self, numbers: Iterable[int]) -> list[list[int]]:
        return bundled(numbers, lambda number: self._due[number].sendable)

    def _gets_nothing_of(self, item: Reduction) -> bool:
        return self._gets_nothing is not None and self._gets_nothing(item.unit)

    def _issue(self, bundles: Sequence[list[Reduction]]) -> None:
        self._issued.update(item.number for bundle in bundles for item in bundle)
        # On streams those of a unit are one operation, and end together.
        for unit, several in groupby(bundles, lambda bundle: bundle[0].unit):
            if unit.has_streams:
                self._start([item for bundle in several for item in bundle])
            else:
                for bundle in several:
                    self._start(bundle)

    def _start(self, batch: Sequence[Reduction]) -> None:
        self.land(self._most_at_end if self._has_ended else max(self._most - 1, 0))
        self._issues(batch)
        self._flying.append(batch)
        self.land(self._most)

    @property
    def num_flying(self) -> int:
        """How many reductions are under way."""
        return len(self._flying)

    def land(self, most: int) -> None:
        """Wait for the oldest reductions until ``most`` are under way."""
        while len(self._flying) > most:
            if self._stall is not None and not all(item.has_arrived() for item in self._flying[0]):
                return
            for item in self._flying.popleft():
                item.finish()
