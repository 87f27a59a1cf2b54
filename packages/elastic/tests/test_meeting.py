"""Ranks meet in a folder: threads, each of them a rank of a host."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vescale_fsdp import RankMismatchError
from vescale_fsdp_elastic import meeting
from vescale_fsdp_elastic.meeting import Meeting, Member, World, complete, ordered


def member(host: str, local: int, num_local: int = 2) -> Member:
    return Member(f"{host}-0", local, num_local, 100 + local)


@pytest.fixture(autouse=True)
def few_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads come at once: a first meeting with room for more hosts need not wait for 5 s."""
    monkeypatch.setattr(meeting, "_FIRST_CALL_S", 1.5)


def test_hosts_count_when_all_of_their_ranks_have_come() -> None:
    a, b = [member("a", 0), member("a", 1)], [member("b", 1)]
    assert complete([*b, *a]) == [a]
    assert complete([]) == []


def test_only_the_last_start_of_a_launcher_counts() -> None:
    first, second = ([Member(f"a-{start}", local, 2, 7) for local in (0, 1)] for start in (0, 1))
    assert complete([*first, *second]) == [second]
    assert complete([*first, second[0]]) == [], "its torchrun ends the ranks of the first start"


def test_hosts_of_the_former_world_come_first() -> None:
    hosts = [[member(name, 0), member(name, 1)] for name in "abc"]
    former = [each.name for each in (*hosts[2], *hosts[1])]
    assert ordered(hosts, former, 5) == [hosts[2], hosts[1], hosts[0]]
    assert ordered(hosts, former, 2) == [hosts[2], hosts[1]]


def test_names_of_members() -> None:
    one = member("node-1", 3, 8)
    assert Member.of(one.name) == one
    assert Member.of("closed") is Member.of("store.new.12") is None


class Host:
    """Meetings of one host, in threads."""

    def __init__(self, folder: Path, name: str, least: int, most: int, num_local: int = 2) -> None:
        members = [member(name, local, num_local) for local in range(num_local)]
        self.meetings = [Meeting(folder, least, most, each) for each in members]

    def join(self) -> list[World]:
        return joined(self.meetings)

    def die(self) -> None:
        for each in self.meetings:
            each.stop()


def joined(meetings: list[Meeting]) -> list[World]:
    """All join at the same time."""
    worlds: dict[int, World] = {}
    threads = []
    for number, each in enumerate(meetings):

        def run(number: int = number, each: Meeting = each) -> None:
            with contextlib.suppress(RankMismatchError):  # it may wait when the test is over
                worlds[number] = each.join(60.0)

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(60.0)
    return [worlds[number] for number in sorted(worlds)]


def test_a_host_is_lost_and_another_comes(tmp_path: Path) -> None:
    a, b = Host(tmp_path, "a", 1, 3), Host(tmp_path, "b", 1, 3)
    first = joined(a.meetings + b.meetings)
    assert [world.rank for world in first] == [0, 1, 2, 3]
    assert {tuple(world.names) for world in first} == {tuple(first[0].names)}
    assert not a.meetings[0].is_wanted()

    a.die()
    second = b.join()
    assert [world.rank for world in second] == [0, 1]
    assert second[0].number > first[0].number

    c = Host(tmp_path, "c", 1, 3)
    waiting = threading.Thread(target=c.join, daemon=True)
    waiting.start()
    end = time.monotonic() + 30
    while not b.meetings[0].is_wanted():
        assert time.monotonic() < end
        time.sleep(0.1)
    third = b.join()
    waiting.join(30.0)
    assert [world.rank for world in third] == [0, 1], "ranks of the former world are first"
    assert len(third[0].names) == 4


def test_no_more_hosts_than_allowed(tmp_path: Path) -> None:
    hosts = [Host(tmp_path, name, 1, 2, num_local=1) for name in "ab"]
    worlds = joined([each.meetings[0] for each in hosts])
    assert len(worlds[0].names) == 2
    spare = Host(tmp_path, "c", 1, 2, num_local=1)
    threading.Thread(target=spare.join, daemon=True).start()
    time.sleep(1.5)
    assert not hosts[0].meetings[0].is_wanted()
    hosts[1].die()
    again = hosts[0].join()
    assert len(again[0].names) == 2, "the spare one has taken its place"


@pytest.mark.nightly
def test_a_host_that_comes_waits_for_ranks_in_a_long_step(tmp_path: Path) -> None:
    """Else it would begin a world of its own, with an older state."""
    a, b = Host(tmp_path, "a", 1, 3), Host(tmp_path, "b", 1, 3)
    assert [each.is_under_way() for each in a.meetings] == [False, False]
    a.join()
    assert b.meetings[0].is_under_way()
    assert b.meetings[1].is_under_way(), "all ranks of a host get one answer"
    coming = threading.Thread(target=b.join, daemon=True)
    coming.start()
    coming.join(7.0)  # longer than the first call, and than a rank without a touch is waited for
    assert coming.is_alive()
    assert len(a.join()[0].names) == 4
    coming.join(30.0)
    assert not coming.is_alive()


@pytest.mark.nightly
def test_a_host_that_comes_after_all_have_gone(tmp_path: Path) -> None:
    a, b = Host(tmp_path, "a", 1, 3, num_local=1), Host(tmp_path, "b", 1, 3, num_local=1)
    a.join()
    a.meetings[0].leave()
    assert not b.meetings[0].is_under_way()
    assert len(b.join()[0].names) == 1


def test_a_host_that_comes_while_ranks_wait_for_more_hosts(tmp_path: Path) -> None:
    """Those have models and a state. It makes its own first, so that all make the same calls."""
    a, b = (Host(tmp_path, name, 2, 2, num_local=1) for name in "ab")
    joined(a.meetings + b.meetings)
    a.die()
    waiting = threading.Thread(target=b.join, daemon=True)  # in the next round, which stays open
    waiting.start()
    time.sleep(1.0)
    again = Host(tmp_path, "c", 2, 2, num_local=1)
    assert again.meetings[0].is_under_way()
    assert len(again.join()[0].names) == 2
    waiting.join(20.0)
    assert not waiting.is_alive()


@pytest.mark.nightly
def test_a_host_that_comes_to_the_second_training_of_a_process(tmp_path: Path) -> None:
    a, b = Host(tmp_path, "a", 1, 3, num_local=1), Host(tmp_path, "b", 1, 3, num_local=1)
    a.join()
    a.meetings[0].leave()
    a.meetings[0].attend()
    assert b.meetings[0].is_under_way()
    a.die()


def test_how_often_a_training_has_begun_and_ended(tmp_path: Path) -> None:
    a, b = Host(tmp_path, "a", 1, 3, num_local=1), Host(tmp_path, "b", 1, 3, num_local=1)
    assert b.meetings[0].noted("run") == (0, 0)
    a.meetings[0].note("run", 2, 1)
    a.meetings[0].note("other", 1, 1)
    assert b.meetings[0].noted("run") == (2, 1)
    assert b.meetings[0].noted("other") == (1, 1)


def test_a_rank_whose_round_was_deleted_comes_to_the_next_one(tmp_path: Path) -> None:
    late, a = Host(tmp_path, "late", 2, 9, num_local=1), Host(tmp_path, "a", 1, 1, num_local=1)
    waiting = threading.Thread(target=late.join, daemon=True)
    waiting.start()
    time.sleep(0.5)
    for _ in range(3):
        a.join()

    def is_in_a_round() -> bool:
        own = late.meetings[0]._own
        return own is not None and own.exists()

    end = time.monotonic() + 30.0  # it looks from time to time whether its round is there
    while not is_in_a_round() and time.monotonic() < end:
        time.sleep(0.05)
    assert is_in_a_round()
    assert waiting.is_alive()
    a.die()


@pytest.mark.nightly
def test_hosts_that_cannot_connect_meet_again_and_do_not_go_on_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network between them is cut, and they learn it at different times."""
    a, b = Host(tmp_path, "a", 1, 3), Host(tmp_path, "b", 1, 3)
    joined(a.meetings + b.meetings)
    connect, failures = Meeting._connect, []

    def cut(self: Meeting, round_: Path, names: Sequence[str]) -> Any:
        if len(failures) < 4:
            failures.append(self.member.name)
            time.sleep(0.2 if self.member.host == "a-0" else 5.0)
            raise TimeoutError("a test")
        return connect(self, round_, names)

    monkeypatch.setattr(Meeting, "_connect", cut)
    monkeypatch.setattr(meeting, "_CONNECT_S", 8.0)
    worlds = joined(a.meetings + b.meetings)
    assert len(failures) >= 4
    assert [len(world.names) for world in worlds] == [4] * 4


def test_a_host_that_others_have_gone_on_without_waits_for_them(tmp_path: Path) -> None:
    """It has an older state, and would win with a world of its own."""
    a, b = Host(tmp_path, "a", 1, 3), Host(tmp_path, "b", 1, 3)
    joined(a.meetings + b.meetings)
    b.die()  # it cannot touch its files
    assert len(a.join()[0].names) == 2
    for each in b.meetings:
        each._has_left = False
        each._thread = threading.Thread(target=each._beat, daemon=True)
        each._thread.start()
    coming = threading.Thread(target=b.join, daemon=True)
    coming.start()
    coming.join(4.0)  # longer than a rank that is lost is waited for
    assert coming.is_alive()
    assert len(a.join()[0].names) == 4
    coming.join(30.0)
    assert not coming.is_alive()


def test_too_few_hosts(tmp_path: Path) -> None:
    (alone,) = Host(tmp_path, "a", 2, 2, num_local=1).meetings
    with pytest.raises(
        RankMismatchError, match=r"1 hosts have come .* expected at least 2.*rank 0 of 1 of a-0"
    ):
        alone.join(1.0)


@pytest.mark.nightly
def test_hosts_that_die_and_come_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks that live are in the last world, whatever has happened meanwhile."""
    monkeypatch.setattr(meeting, "_CONNECT_S", 3.0)
    chance = random.Random(0)
    living: list[Meeting] = []
    for turn in range(6):
        while len(living) < 3 and (not living or chance.random() < 0.8):
            name = f"h{turn}{len(living)}"
            living.append(Meeting(tmp_path, 1, 9, member(name, 0, 1)))
        if len(living) > 1 and chance.random() < 0.6:
            dying = living.pop(chance.randrange(len(living)))
            # It comes, and dies before it connects, or at once.
            threading.Thread(target=joined, args=([dying],), daemon=True).start()
            threading.Timer(chance.random(), dying.stop).start()
        worlds = joined(living)
        while len({world.number for world in worlds}) > 1 or len(worlds[0].names) < len(living):
            worlds = joined(living)
        assert sorted(world.rank for world in worlds) == sorted(
            worlds[0].names.index(each.member.name) for each in living
        )
    for each in living:
        each.stop()
