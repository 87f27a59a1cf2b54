"""Who may begin, who has to wait, and who ends, with a folder and short times."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from pathlib import Path

import pytest

from vescale_fsdp import RankMismatchError
from vescale_fsdp_elastic.hsdp.board import Board
from vescale_fsdp_elastic.hsdp.meeting import Life, Meeting
from vescale_fsdp_elastic.hsdp.quorum import Age, Member, Quorum, Report

NO_AGE = Age(0, 0)


def meeting_of(board: Board, *, stall_s: float = 60.0, wait_s: float = 0.1) -> Meeting:
    life = Life(board, time, 5.0)
    return Meeting(board, time, life, stall_s=stall_s, num_replicas=2, wait_s=wait_s)


def joins(member: Member, age: Age = NO_AGE) -> Report:
    return Report(member, "joining", age)


def test_a_start_that_is_replaced_ends_and_says_so(tmp_path: Path) -> None:
    board = Board(tmp_path)
    first, second = board.register(0, {}), board.register(0, {})
    with pytest.raises(RankMismatchError, match="replica 0 was started again elsewhere"):
        meeting_of(board).meet(joins(first), None)
    board.leave(first)  # its folder is not there
    assert not board.has_left(second)


def test_a_replica_that_is_not_of_the_last_quorum_waits_longer_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = Board(tmp_path)
    old, new = board.register(0, {}), board.register(1, {})
    board.decide(Quorum(4, (new,), 30))
    board.leave(new)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        quorum = meeting_of(board).meet(joins(old, Age(3, 4)), None)
    assert time.monotonic() - began > 0.9  # ten times wait_s
    assert (quorum.number, quorum.members, quorum.step) == (5, (old,), 4)
    assert "goes on from step 4" in caplog.text
    assert "replicas 1) began with step 30" in caplog.text


def test_a_replica_does_not_wait_longer_if_the_training_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = Board(tmp_path)
    old, new = board.register(0, {}), board.register(1, {})
    board.decide(Quorum(4, (new,), 30))
    board.leave(new)
    board.finished = 30
    quorum = meeting_of(board, wait_s=6.0 / 10).meet(joins(old, Age(3, 4)), None)
    assert quorum.members == (old,)
    assert not caplog.text


@pytest.mark.nightly
def test_a_stall_is_counted_from_the_beginning_of_the_wait(tmp_path: Path) -> None:
    board = Board(tmp_path)
    here, busy = board.register(0, {}), board.register(1, {})
    board.decide(Quorum(1, (here, busy), 0))
    ends = threading.Event()

    def live() -> None:
        for number in itertools.count():
            if ends.wait(0.05):
                return
            board.beat(busy, 0, number)
            board.beat(here, 0, number)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        meeting, began = meeting_of(board, stall_s=60.0), time.monotonic()
        report = Report(here, "exchange", Age(1, 3))
        quorum = meeting.meet(report, board.last(), since=began - 61.0)
    finally:
        ends.set()
        thread.join()
    assert quorum.members == (here,)
    assert time.monotonic() - began < 30.0


def test_a_member_that_could_not_join_does_not_ask_again_at_once(tmp_path: Path) -> None:
    board = Board(tmp_path)
    here, new = board.register(0, {}), board.register(1, {})
    board.decide(Quorum(2, (here,), 3))
    meeting = meeting_of(board)
    meeting.not_before = time.monotonic() + 0.5
    thread = threading.Thread(
        target=lambda: meeting.meet(joins(new), Quorum(1, (here, new), 3)), daemon=True
    )
    thread.start()
    time.sleep(0.2)
    assert not board.reports(3)
    while not board.reports(3):
        time.sleep(0.01)
    assert time.monotonic() >= meeting.not_before
    board.decide(Quorum(3, (here, new), 4))
    thread.join()
