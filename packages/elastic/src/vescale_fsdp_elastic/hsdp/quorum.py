"""Who takes part: a numbered set of replicas, and the rule that makes the next one. No messages.

A replica is one copy of the sharded model, on ranks of its own. The replicas of a quorum exchange
their gradients, step after step, until one of them is lost or another wants to come in. Then all
that are alive report where they are, and one decision makes the next quorum::

    quorum 4   replicas 0, 1, 2      replica 1 dies in the exchange of step 7
    reports    0: has made 8 steps   (the sum of step 7 had reached it)
               2: has made 7 steps   (the sum had not reached it)
    quorum 5   replicas 0, 2         replica 2 gets the sum of step 7 from replica 0
    report     1: wants to join      (it was started again)
    quorum 6   replicas 0, 1, 2      between two steps; replica 0 gives its state to replica 1

If no survivor has the sum, those that are left repeat the exchange with the gradients that they
still have. Replicas are at most one step apart: a replica gets the sum of a step only if all have
begun its exchange, and so have finished the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Place = Literal["between", "end", "exchange", "joining"]


class Member(NamedTuple):
    """A start of a replica. A replica that is started again is another member.

    Attributes:
        replica: its number, from 0.
        start: from 1, higher for each start.
    """

    replica: int
    start: int


class Age(NamedTuple):
    """The order of states: the quorum in which the last step was made, then the number of steps."""

    quorum: int
    step: int


class Report(NamedTuple):
    """What a member tells the others before a new quorum.

    Attributes:
        place: "between" two steps; in an "exchange"; at the "end", with the gradients of the last
            step; "joining": it has no state that counts yet.
        age: of its state. Its step is the number of steps that are in it, with that whose sum of
            gradients has just arrived.
        has_sum: whether it has the sum of the last of these steps. One that got its state from
            another has not.
    """

    member: Member
    place: Place
    age: Age
    has_sum: bool = False


@dataclass(frozen=True)
class Quorum:
    """A decision.

    Attributes:
        number: from 1.
        members: by their replicas' numbers.
        step: that of the members that are the furthest.
        source: has the sum of gradients of the last step, for those that are behind.
        behind: members that lack this sum.
        donor: gives its state to those that are joining.
        joining: members that get a state.
    """

    number: int
    members: tuple[Member, ...]
    step: int
    source: Member | None = None
    behind: tuple[Member, ...] = ()
    donor: Member | None = None
    joining: tuple[Member, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "number": self.number,
            "members": [list(each) for each in self.members],
            "step": self.step,
            "source": self.source and list(self.source),
            "behind": [list(each) for each in self.behind],
            "donor": self.donor and list(self.donor),
            "joining": [list(each) for each in self.joining],
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Quorum:
        """Return what `to_json` was called on."""

        def several(key: str) -> tuple[Member, ...]:
            return tuple(Member(*each) for each in value[key])

        source, donor = (value[key] and Member(*value[key]) for key in ("source", "donor"))
        number, step, joining = value["number"], value["step"], several("joining")
        return Quorum(number, several("members"), step, source, several("behind"), donor, joining)


def decide(
    previous: Quorum | None,
    reports: Sequence[Report],
    is_alive: Callable[[Member], bool],
) -> Quorum | None:
    """Return the next quorum; None if one of the previous members may still report.

    Those that join come in only if no member is in an exchange that it has to repeat: a state is
    given away between two steps. If no previous member with a state is left, the newest state of
    those that are here wins.

    Args:
        previous: the last quorum.
        reports: those for the next one, a member's only once.
        is_alive: whether a member may still do something.
    """
    here = sorted(report for report in reports if is_alive(report.member))
    told = {report.member for report in here}
    earlier = previous.members if previous else ()
    if not here or any(is_alive(each) for each in earlier if each not in told):
        return None
    number = 1 if previous is None else previous.number + 1
    joining = tuple(each.member for each in here if each.place == "joining")
    kept = [each for each in here if each.place != "joining" and each.member in earlier]
    if not kept:
        newest = max(here, key=lambda each: (each.age, -each.member.replica))
        others = tuple(each for each in joining if each != newest.member)
        return Quorum(number, joining, newest.age.step, donor=newest.member, joining=others)
    step = max(each.age.step for each in kept)
    first = [each for each in kept if each.age.step == step]
    behind = tuple(each.member for each in kept if each.age.step < step)
    assert all(each.age.step >= step - 1 for each in kept), f"at most one step apart: {kept}"
    source = next((each.member for each in first if each.has_sum), None) if behind else None
    if source is None:
        behind = ()  # those that were behind are out, and get the state when they join again
    members = [each.member for each in first] + [*behind]
    donor = None
    if joining and all(each.place == "between" for each in first):
        members += joining
        donor = first[0].member
    coming = joining if donor else ()
    return Quorum(number, tuple(sorted(members)), step, source, behind, donor, coming)
