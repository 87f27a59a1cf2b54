"""The shared folder: a decision is made once, and a replica has one living start."""

from __future__ import annotations

from pathlib import Path

from vescale_fsdp_elastic.hsdp.board import Board
from vescale_fsdp_elastic.hsdp.quorum import Age, Member, Quorum, Report


def test_the_first_decision_holds(tmp_path: Path) -> None:
    one, other = Board(tmp_path), Board(tmp_path)
    first, second = Quorum(1, (Member(0, 1),), 3), Quorum(1, (Member(1, 1),), 3)
    assert one.last() is None
    one.decide(first)
    other.decide(second)
    assert other.decision(1) == one.last() == first
    assert [path.name for path in one.quorum_folder(1).iterdir()] == ["decision.json"]


def test_a_new_start_replaces_the_one_before(tmp_path: Path) -> None:
    board = Board(tmp_path)
    first = board.register(2, {"ranks": 1})
    board.beat(first, 0, 5)
    board.beat(first, 1, 7)
    assert board.beats(first) == {"beat-00000": "5", "beat-00001": "7"}
    assert board.beats(first, 1) == {"beat-00001": "7"}
    assert not board.is_replaced(first)
    second = board.register(2, {"ranks": 4})
    assert (first, second) == (Member(2, 1), Member(2, 2))
    assert board.is_replaced(first)
    assert not board.is_replaced(second)
    assert board.beats(first) == {}
    assert board.about(second) == {"ranks": 4}
    assert board.register(0, {}) == Member(0, 1)
    board.leave(second)
    assert board.has_left(second)


def test_reports_and_failures(tmp_path: Path) -> None:
    board = Board(tmp_path)
    assert board.reports(3) == board.failures(3) == []
    report = Report(Member(1, 12), "exchange", Age(2, 40), has_sum=True)
    board.report(3, report._replace(place="between"))
    board.report(3, report)
    board.give_up(3, 40)
    assert board.reports(3) == [report]
    assert board.failures(3) == [40]


def test_old_quorums_are_deleted(tmp_path: Path) -> None:
    board = Board(tmp_path)
    for number in range(1, 9):
        board.decide(Quorum(number, (), 0))
    assert sorted(path.name for path in (tmp_path / "quorums").iterdir()) == [
        "000006",
        "000007",
        "000008",
    ]


def test_the_end(tmp_path: Path) -> None:
    board = Board(tmp_path)
    assert board.finished == 0
    board.finished = 30
    assert Board(tmp_path).finished == 30
