"""The reductions of one backward, in the order that all ranks have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from vescale_fsdp.dbuffer import Comm
from vescale_fsdp.engine.group import Group, together
from vescale_fsdp.engine.order import AT_THE_END, Walk

if TYPE_CHECKING:
    from vescale_fsdp.engine.unit import Unit

__all__ = ["Due", "Reductions"]


class Due(NamedTuple):
    """A group that is to be reduced in a backward."""

    number: int  # of the group, the same on all ranks
    group: Group
    unit: Unit
    unit_index: int


class Reductions:
    """Issues the reductions of one backward, and waits for them.

    A group is reduced when all of its gradients are there, the groups before it have been issued,
    and as many gathers lie behind as its place in the order says. The last keeps ranks that skip
    units from waiting for each other in a circle (docs/design/schedule.md).

    Args:
        due: the groups to reduce, in the order to take where none is recorded.
        walk: the backward. While it records, nothing is issued but what `issue` is told, and the
            rest at the end.
        ran: the units that have run on this rank in the forwards before.
        in_agreement: whether orders are recorded together with all ranks. Without that the order
            is that of ``due``, and holds from the first backward.
        comm_of: the communicators of a group.
        most: how many may be under way while gradients of another group appear. 0: each is waited
            for at once.
        most_at_end: how many may be under way while another group is copied when the backward has
            ended: it has let go of parameters then, so that there is room for one more.
    """

    def __init__(
        self,
        due: Sequence[Due],
        walk: Walk,
        ran: Set[int],
        in_agreement: bool,
        comm_of: Callable[[Group], Comm],
        most: int,
        most_at_end: int,
    ) -> None:
        self._due = {item.number: item for item in due}
        self._walk = walk
        self._ran = ran
        self._records = in_agreement and walk.is_recording
        self._finds_skipped = in_agreement and not walk.is_recording
        self._listed = [(item.number, 0) for item in due]
        self._num_taken = 0  # of `_queue`
        self._comm_of = comm_of
        self._most, self._most_at_end = most, most_at_end
        self._numbers = {id(item.group): item.number for item in due}
        self._complete: dict[int, None] = {}  # numbers of groups, as they became complete
        self._issued: set[int] = set()
        self.late: list[int] = []  # those that only the end of the backward completes
        self._flying: deque[list[Group]] = deque()
        self.again: list[int] = []  # to be reduced once more at the end, the same on all ranks
        self._has_ended = False
        self.is_told = False  # whether a user has said how many may be under way

    @property
    def _queue(self) -> Sequence[tuple[int, int]]:
        """Groups and their places, in order. Places move when a gather is added before them."""
        return self._walk.order.reductions if self._finds_skipped else self._listed

    @property
    def reduced_too_early(self) -> list[int]:
        """The groups that were issued, and have got gradients since: they ran once more."""
        return [
            n
            for n, item in self._due.items()
            if n in self._issued and item.group.gradients.are_waiting
        ]

    def units_of(self, numbers: Iterable[int]) -> list[int]:
        """The indices of the units that have these groups."""
        return list(dict.fromkeys(self._due[number].unit_index for number in numbers))

    @property
    def groups(self) -> list[Group]:
        """All that are to be reduced."""
        return [item.group for item in self._due.values()]

    @property
    def ready(self) -> list[int]:
        """The groups that are complete and not issued, as they became complete."""
        return [number for number in self._complete if number not in self._issued]

    def complete(self, groups: Iterable[Group]) -> None:
        """These groups have all of their gradients."""
        for group in groups:
            number = self._numbers.get(id(group))
            if number is not None:
                self._complete.setdefault(number)
        self.proceed()

    def complete_rest(self) -> None:
        """The backward has ended on this rank: no more gradients come."""
        self._has_ended = True
        missing = [number for number in self._due if number not in self._complete]
        self.late = [number for number in missing if not self._was_skipped(number)]
        for number in missing:
            self._complete.setdefault(number)
        self.proceed()

    def proceed(self) -> None:
        """Issue what only waited for its place. To be called after each move of the walk."""
        ready: list[int] = []
        while not self._records and self._num_taken < len(self._queue):
            number, place = self._queue[self._num_taken]
            if place > self._walk.place:
                break
            skipped = self._finds_skipped and self._was_skipped(number)
            if number not in self._complete and not skipped:
                break
            self._num_taken += 1
            ready.append(number)
        self._issue(ready)

    def _was_skipped(self, number: int) -> bool:
        # It has not run on this rank, so that no gradient of it can come.
        item = self._due[number]
        has_run = item.unit_index in self._ran or item.unit_index in self._walk.ran
        return not has_run and not item.unit.awaits_backward

    def issue(self, complete: Iterable[int], late: Iterable[int]) -> None:
        """While recording: issue what is complete on all ranks, and late on none."""
        for number in complete:
            if number not in late:
                self._walk.order.reductions.append((number, self._walk.place))
                self._issue([number])

    def finish(self, when_issued: Callable[[], None]) -> None:
        """Issue what is left, call ``when_issued``, and wait for everything."""
        left = [number for number in self._due if number not in self._issued]
        if self._records:
            self._walk.order.reductions += [(number, AT_THE_END) for number in left]
        self._issue(left)
        when_issued()
        self.land(0)
        for number in self._due:  # gradients that came after their group was thought complete
            if number in self.again:
                self._start([self._due[number].group])
        self.land(0)
        for group in self.groups:
            group.gradients.finish_sum()

    def _issue(self, numbers: Sequence[int]) -> None:
        self._issued.update(numbers)
        # On streams those of a unit are one operation, and land together.
        for _, several in groupby(map(self._due.__getitem__, numbers), lambda due: due.unit_index):
            groups = [due.group for due in several]
            for batch in [groups] if groups[0].has_streams else [[each] for each in groups]:
                self._start(batch)

    def _start(self, groups: list[Group]) -> None:
        self.land(self._most_at_end if self._has_ended else max(self._most - 1, 0))
        comms = [self._comm_of(group) for group in groups]
        with together(groups, comms):
            for group, comm in zip(groups, comms, strict=True):
                group.gradients.start_reduce(comm)
        self._flying.append(groups)
        self.land(self._most)

    @property
    def num_flying(self) -> int:
        """How many reductions are under way."""
        return len(self._flying)

    def land(self, most: int) -> None:
        """Wait for the oldest reductions until ``most`` are in flight."""
        while len(self._flying) > most:
            for group in self._flying.popleft():
                group.gradients.finish_reduce()
