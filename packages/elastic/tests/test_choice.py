"""Which generation wins, and who sends what."""

from __future__ import annotations

from vescale_fsdp_elastic.choice import (
    Age,
    Found,
    Hosts,
    Transfer,
    candidates,
    to_have,
    to_lacking,
    to_neighbours,
)

FILES = {"rank-00000.bin": 8, "rank-00001.bin": 6}
FIRST, SECOND = FILES


def found(attempt: int, step: int, *here: str, id_: str = "x") -> Found:
    return Found(Age(attempt, step), id_, FILES, here)


def test_the_newest_attempt_wins_and_not_the_latest_step() -> None:
    """The first host was away, and comes back from an attempt that the others have replaced."""
    order = candidates([[found(1, 90, FIRST, SECOND)], [found(2, 50, FIRST), found(2, 40, FIRST)]])
    assert [each.age for each in order] == [Age(2, 50), Age(2, 40), Age(1, 90)]
    assert [each.lost for each in order] == [[SECOND], [SECOND], []]


def test_files_of_two_hosts_make_one_generation() -> None:
    (one,) = candidates([[found(1, 10, FIRST)], [], [found(1, 10, FIRST, SECOND)]])
    assert one.lost == []
    assert one.holders == {FIRST: [0, 2], SECOND: [2]}


def test_files_of_two_checkpoints_of_the_same_age_are_not_mixed() -> None:
    order = candidates([[found(1, 10, FIRST, id_="a")], [found(1, 10, SECOND, id_="b")]])
    assert [each.lost for each in order] == [[FIRST], [SECOND]]


def test_the_complete_one_of_two_of_the_same_age_is_first() -> None:
    order = candidates([[found(1, 10, FIRST, id_="z")], [found(1, 10, FIRST, SECOND, id_="a")]])
    assert [each.id for each in order] == ["a", "z"]


def test_hosts_are_numbered_by_their_first_rank() -> None:
    hosts = Hosts.named(["b", "b", "a", "b"])
    assert len(hosts) == 2
    assert hosts.ranks(0) == [0, 1, 3]
    assert hosts.place(3) == (2, 3)
    assert [hosts.is_leader(rank) for rank in range(4)] == [True, False, True, False]


SIZES = [("f0", 4), ("f1", 4), ("f2", 4), ("f3", 4), ("f4", 0)]


def test_each_rank_sends_to_the_next_hosts() -> None:
    hosts = Hosts([0, 0, 1, 1, 2])
    pairs = [(each.sender, each.receiver) for each in to_neighbours(hosts, SIZES, 1)]
    assert pairs == [(0, 2), (1, 3), (2, 4), (3, 4)]  # the last one has nothing to send
    pairs = [(each.sender, each.receiver) for each in to_neighbours(hosts, SIZES, 9)]
    assert pairs == [(0, 2), (0, 4), (1, 3), (1, 4), (2, 4), (2, 0), (3, 4), (3, 1)]
    assert to_neighbours(Hosts([0, 0]), SIZES[:2], 1) == []


def test_a_host_has_what_its_ranks_need_and_enough_copies_of_all() -> None:
    hosts = Hosts([0, 0, 1, 2])
    (one,) = candidates([[found(1, 10, FIRST, SECOND)], [], []])
    needed = [[FIRST], [FIRST], [SECOND], []]
    assert to_have(hosts, one, needed, 0) == [[FIRST], [SECOND], []]
    assert to_have(hosts, one, needed, 1) == [[FIRST], [FIRST, SECOND], []]
    assert to_have(hosts, one, needed, 9) == [[FIRST, SECOND]] * 3


def test_what_a_host_lacks_comes_from_the_ranks_with_the_least_to_send() -> None:
    hosts = Hosts([0, 0, 1])
    (one,) = candidates([[found(1, 10, FIRST, SECOND)], []])
    wanted = [FILES, FILES]
    assert to_lacking(hosts, one, wanted) == [
        Transfer(FIRST, 8, 0, 2),
        Transfer(SECOND, 6, 1, 2),
    ]
