"""One step after the other: sum the gradients with who is there, until all that live have the sum.

::

    sum  ->  all of this replica's ranks have it  ->  the step is made
     |
     +-- not: meet (a new quorum) -> connect -> get the sum if another member has it -> else repeat

A member keeps its own gradients until it has the sum, and the sum until the next one is complete.
So whatever fails, the members of the next quorum end up with one sum of this step: that which one
of them has already used, or a new one of those that are left.
"""

from __future__ import annotations

from typing import Protocol

from vescale_fsdp_elastic.hsdp.quorum import Age, Member, Place, Quorum, Report


class Link(Protocol):
    """What carries messages between the members. Each call is made on all ranks of a replica.

    The results are the same on all ranks of a replica.
    """

    def meet(self, report: Report, previous: Quorum | None) -> Quorum:
        """Agree on the next quorum."""

    def connect(self, quorum: Quorum) -> bool:
        """Connect to the other members. Returns whether it was possible."""

    def sum(self, quorum: Quorum, report: Report) -> bool:
        """Sum this step's gradients. Returns whether the sum is complete."""

    def hand_over(self, quorum: Quorum, report: Report) -> bool:
        """Send the kept sum of the last step to those that are behind, or receive it."""

    def give(self, quorum: Quorum, report: Report) -> bool:
        """Send this member's state to those that join."""

    def receive(self, quorum: Quorum, report: Report) -> bool:
        """Get and load the donor's state."""


class Exchange:
    """The exchanges of one member.

    Args:
        age: of the state that this member has on its own.

    Attributes:
        step: number of steps whose sum this member has.
        quorum: the current one; None before `join`.
    """

    def __init__(self, link: Link, member: Member, age: Age) -> None:
        self._link, self._member, self._age = link, member, age
        self._has_sum = False
        self.step = age.step
        self.quorum: Quorum | None = None

    @property
    def age(self) -> Age:
        """The age of the state after the step that is being made."""
        return self._age

    def join(self) -> None:
        """Wait until the others take this member in, and get their state."""
        self._meet("joining")

    def reduce(self) -> None:
        """Make the next step: return when its gradients are those of who is there.

        Raises:
            RankMismatchError: the others have gone on without this member, or a rank of this
                replica has died.
        """
        assert self.quorum is not None, "join first"
        before = self.step
        while self.step == before:
            if self._link.sum(self.quorum, self._report("exchange")):
                self._made()
            else:
                self._meet("exchange")

    def admit(self) -> None:
        """Between two steps: make a new quorum, with those that want to join."""
        self._meet("between")

    def finish(self) -> None:
        """In the last step, after `reduce`: return when all members have its sum.

        A quorum is made for it, which nobody can join. A member that was lost for a while, and
        whose step the others have repeated without it, learns of this here.
        """
        while self._meet("end").behind:
            pass

    def _report(self, place: Place) -> Report:
        return Report(self._member, place, self._age, self._has_sum)

    def _made(self) -> None:
        assert self.quorum is not None, "it is a member"
        self.step += 1
        self._age, self._has_sum = Age(self.quorum.number, self.step), True

    def _meet(self, place: Place) -> Quorum:
        while True:
            quorum = self._link.meet(self._report(place), self.quorum)
            self.quorum = quorum
            if self._member == quorum.donor and place == "joining":
                place = "between"  # its state is the one that counts
            if place == "end" and not quorum.behind:
                return quorum
            if not self._link.connect(quorum):
                place = _without(quorum, place)
                continue
            report = self._report(place)
            if self._member in quorum.joining:
                if self._link.receive(quorum, report):
                    self.step = quorum.step
                    self._age, self._has_sum = Age(quorum.number, self.step), False
                    return quorum
                continue
            if quorum.behind:
                if not self._link.hand_over(quorum, report):
                    continue
                if self._member in quorum.behind:
                    self._made()
                    return quorum
            gives = quorum.joining and self._member == quorum.donor
            if not gives or self._link.give(quorum, report):
                return quorum
            place = _without(quorum, place)


def _without(quorum: Quorum, place: Place) -> Place:
    """The place from which a member makes its step before others can join.

    A replica that cannot join would stop the others for ever if they tried again at once.
    """
    return "exchange" if quorum.joining and place == "between" else place
