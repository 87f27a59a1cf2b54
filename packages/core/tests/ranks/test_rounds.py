"""Rounds through a store: what ranks give is merged along a tree, in the order of ranks."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Barrier
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore, PrefixStore, TCPStore

from vescale_fsdp.engine.finite import _merged, _sentence
from vescale_fsdp.program.record import Record
from vescale_fsdp.program.record import merge as merge_records
from vescale_fsdp.ranks.attempt import AbsentError, agree_on_name
from vescale_fsdp.ranks.ranks import MergeTree, Ranks, merge_pairs


class Counted:
    """A store that counts what one rank asks of it."""

    def __init__(self, store: Any) -> None:
        self._store, self.num_operations = store, 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.num_operations += 1
            return getattr(self._store, name)(*args)

        return call


def together(work: Callable[[int], Any], numbers: Sequence[int]) -> list[Any]:
    """What ``work`` returns or raises for each number, in threads that begin together."""
    barrier = Barrier(len(numbers))

    def begin(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(len(numbers)) as pool:
        calls = [pool.submit(begin, number) for number in numbers]
        return [call.exception() or call.result() for call in calls]


def joined(values: list[list[Any]]) -> list[Any]:
    return [each for value in values for each in value]


def exchange(
    ranks: Ranks, store: Any, value: Any, seconds: float, finish: Callable[[Any], Any] | None = None
) -> Any:
    """One round, whose error tells of positions in the tree."""
    return ranks._round(store, "x", value, joined, finish, time.monotonic() + seconds, seconds)


def stores() -> list[Any]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [HashStore(), PrefixStore("a", HashStore()), server]


# The tree


@pytest.mark.parametrize("fan_in", [1, 2, 3, 16])
def test_subtrees_are_runs_of_numbers_and_hang_together(fan_in: int) -> None:
    for size in range(1, 60):
        tree = MergeTree(size, fan_in)

        def run(number: int, tree: MergeTree = tree) -> list[int]:
            children = tree.children(number)
            assert len(children) <= fan_in
            return [number, *(each for child in children for each in run(child))]

        assert run(0) == list(range(size))


@pytest.mark.parametrize(("size", "depth"), [(17, 1), (18, 2), (273, 2), (274, 3), (4096, 3)])
def test_it_is_shallow(size: int, depth: int) -> None:
    tree = MergeTree(size, 16)

    def levels(number: int) -> int:
        return max((1 + levels(child) for child in tree.children(number)), default=0)

    assert levels(0) == depth


# Rounds


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_all_get_what_ranks_gave_in_their_order_for_few_operations(seed: int) -> None:
    random = Random(seed)
    size, fan_in, num_rounds = random.randint(1, 40), random.choice([1, 2, 4, 16]), 3
    ranks = random.sample(range(100), size)
    store = stores()[seed % 3]

    def work(rank: int) -> tuple[list[str], int]:
        clone = store.clone() if isinstance(store, TCPStore) else store
        counted = Counted(clone)
        rounds = Ranks(ranks, rank, fan_in=fan_in)
        answers = []
        for turn in range(num_rounds):
            time.sleep(Random(rank * turn).random() / 100)
            answer = exchange(rounds, counted, [[rank, turn]], 30.0, lambda said: f"is {said}")
            answers.append(answer)
        return answers, counted.num_operations

    expected = [f"is {[[rank, turn] for rank in ranks]}" for turn in range(num_rounds)]
    for answers, num_operations in together(work, ranks):
        assert answers == expected
        assert num_operations <= 6 * num_rounds + 3  # one more where a wait is long


def test_two_ranks_need_three_and_four_operations() -> None:
    store = HashStore()

    def work(rank: int) -> int:
        counted = Counted(store)
        exchange(Ranks([0, 1], rank), counted, [], 5.0)
        return counted.num_operations

    assert together(work, [0, 1]) == [4, 3]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled(1)
def test_each_rank_names_those_that_do_not_come(seed: int) -> None:
    """Not those that themselves wait for them; and nobody waits for longer than it was told to."""
    random = Random(seed)
    size, fan_in = random.randint(2, 40), random.choice([1, 2, 4, 16])
    away = sorted(random.sample(range(size), random.randint(1, min(3, size - 1))))
    ranks = list(range(100, 100 + size))
    store = stores()[seed % 3]

    def work(number: int) -> str:
        clone = store.clone() if isinstance(store, TCPStore) else store
        return exchange(Ranks(ranks, ranks[number], fan_in=fan_in), clone, [number], 2.0)

    begun = time.monotonic()
    for error in together(work, [number for number in range(size) if number not in away]):
        assert isinstance(error, AbsentError)
        assert list(error.numbers) == away
    assert time.monotonic() - begun < 10


def test_few_of_many_are_named() -> None:
    with pytest.raises(AbsentError, match=r"^rank 1 and others has") as info:
        exchange(Ranks(range(1000), 0), HashStore(), [], 0.05)
    assert list(info.value.numbers) == list(range(1, 18))


def test_a_rank_that_has_all_and_says_nothing_is_named() -> None:
    store = HashStore()
    for key in ("x/1/0/here", "x/1/1/here", "x/1/2", "x/1/3", "x/1/4", "x/1/6"):
        store.set(key, "[]")
    with pytest.raises(AbsentError) as info:  # 0 has 1 and 4, 1 has 2 and 3, 4 has 5 and 6
        exchange(Ranks(range(7), 5, fan_in=2), store, [], 0.05)
    assert list(info.value.numbers) == [1]


# What is merged


def splits(payloads: list[Any], random: Random, merge: Callable[[list[Any]], Any]) -> Any:
    """The same merged in parts: of consecutive payloads, some of them merged before."""
    while len(payloads) > 1:
        start = random.randrange(len(payloads) - 1)
        stop = random.randint(start + 2, len(payloads))
        payloads = [*payloads[:start], merge(payloads[start:stop]), *payloads[stop:]]
    return payloads[0]


@pytest.mark.parametrize("seed", range(20))
def test_the_first_rank_that_differs_is_named_wherever_it_is(seed: int) -> None:
    random = Random(seed)
    size = random.randint(2, 40)
    entries = [["a"] if random.random() < 0.9 else [random.choice("bc")] for _ in range(size)]
    payloads = [[[each, rank]] for rank, each in enumerate(entries)]
    other = next((rank for rank, each in enumerate(entries) if each != entries[0]), None)
    expected = [0] if other is None else [0, other]
    assert [rank for _, rank in splits(payloads, random, merge_pairs)] == expected


def test_first_and_other() -> None:
    assert merge_pairs([[], []]) == []
    assert merge_pairs([["aa", "ab"]]) == ["aa"]
    assert merge_pairs([["a0", "a1"], ["b2", "c3"]]) == ["a0", "b2"]


def record(random: Random, rank: int) -> Record:
    """What a rank may say; in rare cases it is in another pass."""

    def some() -> list[int]:
        return random.sample(range(9), random.randint(0, 4))

    step = "a backward" if random.random() < 0.02 else "a forward"
    wants = [(random.randrange(9), random.random() < 0.5)] if random.random() < 0.3 else []
    used = [(some(), [(group, 1) for group in some()], rank)]
    return Record(step, wants, used, some(), late=some(), ran=some(), skips=random.random() < 0.2)


@pytest.mark.parametrize("seed", range(20))
def test_records_merge_in_parts_as_at_once(seed: int) -> None:
    random = Random(seed)

    def merge(said: Sequence[str]) -> str:
        records = [Record(**json.loads(each)) for each in said]
        return json.dumps(merge_records(records).__dict__)

    said = [json.dumps(record(random, rank).__dict__) for rank in range(random.randint(1, 40))]
    assert json.loads(splits(said, random, merge)) == json.loads(merge(said))


def test_names_of_what_is_not_finite_merge_in_parts_as_at_once() -> None:
    random = Random(0)
    found = [
        [[name, "NaN", [rank]] for name in "abc" if random.random() < 0.5] for rank in range(9)
    ]
    assert _sentence(splits(found, random, _merged)) == _sentence(_merged(found))


# A name


@pytest.mark.parametrize("size", [1, 2, 17, 18, 40])
def test_many_ranks_agree_on_a_name_beside_what_others_have_left(size: int) -> None:
    store = HashStore()
    before: set[str] = set()
    for attempt in range(3):
        for rank in Random(attempt).sample(range(1, size), size // 3):
            number = store.add("here/num_asked", 1)
            if rank % 2:
                store.set(f"here/asked/{number}", f"of {rank}")  # and was killed
        found = set(
            together(lambda rank: agree_on_name(store, "here", rank, size, 30.0), range(size))
        )
        assert len(found) == 1
        assert not found & before
        before |= found


@pytest.mark.parametrize("away", [0, 1, 39])
@pytest.mark.parametrize("has_left", [False, True])
@pytest.mark.sampled(2)
def test_who_does_not_come_for_a_name_is_named(away: int, has_left: bool) -> None:
    """By those that wait for it; the others go on, and meet it in their first round."""
    size, store = 40, HashStore()
    if has_left:
        together(lambda rank: agree_on_name(store, "here", rank, size, 30.0), range(size))
    here = [rank for rank in range(size) if rank != away]
    found = together(lambda rank: agree_on_name(store, "here", rank, size, 2.0), here)
    errors = [each for each in found if isinstance(each, AbsentError)]
    assert {number for error in errors for number in error.numbers} == {away}
    assert len(errors) == (size - 1 if away == 0 else 1)


def test_operations_for_a_name() -> None:
    size, store = 300, HashStore()
    counts: Counter[int] = Counter()

    def work(rank: int) -> str:
        counted = Counted(store)
        name = agree_on_name(counted, "here", rank, size, 60.0)
        counts[rank] = counted.num_operations
        return name

    assert len(set(together(work, range(size)))) == 1
    # A number, the token, the wait, the name, and two to be ready.
    assert {counts[rank] for rank in range(1, size)} == {6}


def test_a_name_without_a_limit() -> None:
    store = HashStore()
    found = together(lambda rank: agree_on_name(store, "here", rank, 2, math.inf), range(2))
    assert len({str(each) for each in found}) == 1, found


class Unanswered:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise DistNetworkError("broken pipe")


def test_a_step_names_a_rank_also_if_the_store_is_gone() -> None:
    store: Any = Unanswered()
    ranks, value, end = Ranks([0, 1], 1, store), {"step": "a save"}, time.monotonic() + 1.0
    with pytest.raises(AbsentError) as caught:
        ranks._round(store, "next step", value, joined, None, end, 1.0)
    assert caught.value.numbers == [0]
