"""Decisions: who takes part, who gets a sum, who gets a state."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from vescale_fsdp_elastic.hsdp.quorum import Age, Member, Place, Quorum, Report, decide

A, B, C = Member(0, 1), Member(1, 1), Member(2, 1)
B2 = Member(1, 2)
FOUR = Quorum(4, (A, B, C), 7)


def report(member: Member, place: Place, step: int, quorum: int = 4, *, has: bool = True) -> Report:
    return Report(member, place, Age(quorum, step), has)


def decided(*reports: Report, alive: Collection[Member] = (A, B, B2, C)) -> Quorum | None:
    return decide(FOUR, reports, lambda member: member in alive)


def test_all_that_are_alive_are_waited_for() -> None:
    reports = [report(A, "exchange", 8), report(C, "exchange", 8)]
    assert decided(*reports) is None
    assert decided(*reports, alive=(A, C)) == Quorum(5, (A, C), 8)
    assert decide(FOUR, [], lambda member: False) is None


def test_the_sum_of_one_that_has_it_is_for_all() -> None:
    quorum = decided(report(A, "exchange", 7), report(C, "exchange", 8), alive=(A, C))
    assert quorum == Quorum(5, (A, C), 8, source=C, behind=(A,))


def test_who_lacks_a_sum_that_nobody_has_is_out() -> None:
    """C has got its state, step 8, from a replica that has then died."""
    quorum = decided(report(A, "exchange", 7), report(C, "exchange", 8, has=False), alive=(A, C))
    assert quorum == Quorum(5, (C,), 8)


def test_a_replica_comes_in_between_two_steps_only() -> None:
    joins = report(B2, "joining", 3, quorum=2)
    here = (A, B2, C)
    between = [report(A, "between", 8), report(C, "between", 8)]
    quorum = decided(*between, joins, alive=here)
    assert quorum == Quorum(5, (A, B2, C), 8, donor=A, joining=(B2,))
    quorum = decided(report(A, "between", 8), report(C, "exchange", 8), joins, alive=here)
    assert quorum == Quorum(5, (A, C), 8)
    # C will be between two steps when it has the sum of A.
    quorum = decided(report(A, "between", 8), report(C, "exchange", 7), joins, alive=here)
    assert quorum == Quorum(5, (A, B2, C), 8, A, (C,), A, (B2,))
    quorum = decided(report(A, "end", 8), report(C, "end", 8), joins, alive=here)
    assert quorum == Quorum(5, (A, C), 8)


def test_the_newest_state_wins_if_no_member_is_left() -> None:
    """Step 9 of quorum 3 was made by a replica that was cut off: the others repeated it."""
    reports = [report(A, "joining", 9, quorum=3), report(B2, "joining", 8), report(C, "joining", 8)]
    quorum = decided(*reports)
    assert quorum is None, "B may still be alive"
    alive = (Member(0, 1), B2, C)
    quorum = decide(Quorum(4, (B,), 8), reports, lambda member: member in alive)
    assert quorum == Quorum(5, (A, B2, C), 8, donor=B2, joining=(A, C))


def test_a_member_that_lost_its_donor_joins_again() -> None:
    quorum = decided(report(A, "exchange", 8), report(C, "joining", 0, quorum=0), alive=(A, C))
    assert quorum == Quorum(5, (A,), 8)


def test_two_steps_apart_cannot_be() -> None:
    with pytest.raises(AssertionError, match="one step apart"):
        decided(report(A, "exchange", 6), report(C, "exchange", 8), alive=(A, C))


def test_json() -> None:
    quorum = Quorum(5, (A, B2, C), 8, source=A, behind=(C,), donor=A, joining=(B2,))
    assert Quorum.from_json(quorum.to_json()) == quorum
    assert Quorum.from_json(FOUR.to_json()) == FOUR
