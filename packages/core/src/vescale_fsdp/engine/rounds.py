"""Rounds through a store: each rank gives something, all get what that merges to.

Along a tree (`merge_tree`), so that no rank has more to do than its fan-in asks for. Of round 3 of
a topic, where rank 1 has the children 2 and 3::

    rank 2   what it gives ---------------------> | topic/3/2
    rank 3   what it gives ---------------------> | topic/3/3
    rank 1   that it is here -------------------> | topic/3/1/here
             waits for 2 and 3, reads, merges --> | topic/3/1
    rank 0   ... its children, merges ----------> | topic/3/result      read by all

Each rank waits for as long as it was told to, from its own begin, wherever it is in the tree.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from vescale_fsdp import compat, waiting
from vescale_fsdp.engine.attempts import AbsentError
from vescale_fsdp.engine.merge_tree import FAN_IN, MergeTree

Merge: TypeAlias = Callable[[list[str]], str]
Finish: TypeAlias = Callable[[str], str]
_Pair = TypeVar("_Pair", bound=Sequence[Any])
MAX_NAMED = 16  # of ranks that are absent: to look for each costs the store a few messages


def first_and_other(pairs: Iterable[_Pair]) -> list[_Pair]:
    """The first of some pairs, and the first whose left side is another, if there is one.

    What it returns for parts of a list, put together in order, gives what it returns for the list.
    """
    pairs = list(pairs)
    return pairs[:1] + [pair for pair in pairs if pair[0] != pairs[0][0]][:1]


class Rounds:
    """What this rank needs for rounds with others. It has no other state than counters.

    Args:
        store: no process before has used it (`attempts.store_for`); then all count from zero.
        ranks: global ones; the first is the root. The same list on all of them.
        me: this rank.
        fan_in: of the tree.
    """

    def __init__(
        self, store: compat.Store, ranks: Sequence[int], me: int, fan_in: int = FAN_IN
    ) -> None:
        self._store, self._ranks = store, ranks
        self._tree = MergeTree(len(ranks), fan_in)
        self._number = ranks.index(me)
        self._children = self._tree.children(self._number)
        self._turns: Counter[str] = Counter()

    def exchange(
        self, topic: str, payload: str, merge: Merge, within_s: float, finish: Finish | None = None
    ) -> str:
        """What the payloads of all ranks merge to, on every rank.

        Blocking. Three operations of the store, six of a rank that has children, four of the root;
        each on at most as many keys as the fan-in.

        Args:
            merge: makes one payload of several, in the order of ranks; each is what a rank gave or
                has itself been merged from those of consecutive ranks. Must be associative.
            finish: makes the answer of the last payload, on the first rank; None: that is it.

        Raises:
            AbsentError: not all have come in time, or the store is gone.
        """
        self._turns[topic] += 1
        place, deadline = f"{topic}/{self._turns[topic]}", time.monotonic() + within_s

        def wait(keys: list[str]) -> None:
            left = deadline - time.monotonic()
            waiting.store_wait(
                self._store, keys, left, self._ranks, f"the comparison of the {topic}"
            )

        try:
            return self._exchange(place, payload, merge, finish, wait)
        except dist.DistError as error:
            absent = itertools.islice(self._absent(place, 0), MAX_NAMED + 1)
            raise AbsentError([*absent] or [0], within_s) from error

    def _exchange(
        self,
        place: str,
        payload: str,
        merge: Merge,
        finish: Finish | None,
        wait: Callable[[list[str]], None],
    ) -> str:
        result = _result(place)
        theirs: list[bytes] = []
        if self._children:
            self._store.set(_here(place, self._number), "")
            keys = [_key(place, child) for child in self._children]
            wait(keys)
            theirs = self._store.multi_get(keys)
        if self._children or self._number == 0:
            payload = merge([payload, *(each.decode() for each in theirs)])
        if self._number == 0:
            answer = payload if finish is None else finish(payload)
            self._store.set(result, answer)
            return answer
        self._store.set(_key(place, self._number), payload)
        wait([result])
        return str(self._store.get(result).decode())

    def _absent(self, place: str, number: int) -> Iterator[int]:
        """Who keeps the subtree of ``number`` waiting, root of it first.

        A few operations for each that is absent, and for each on the way to it.
        """
        if self._is_there(_key(place, number) if number else _result(place)):
            return
        children = self._tree.children(number)
        below = itertools.chain.from_iterable(self._absent(place, child) for child in children)
        if children and self._is_there(_here(place, number)):
            first = next(below, number)  # itself, if it has all that it waits for
            yield first
        else:
            yield number
        yield from below

    def _is_there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except dist.DistError:
            return True  # nobody knows


def _key(place: str, number: int) -> str:
    """Of what a rank has, with what the ranks below it have."""
    return f"{place}/{number}"


def _here(place: str, number: int) -> str:
    """Of a word that a rank has come, which waits for others before it says more."""
    return f"{place}/{number}/here"


def _result(place: str) -> str:
    return f"{place}/result"
