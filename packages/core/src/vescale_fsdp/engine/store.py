"""The store for agreements between ranks: keys that are new in each attempt, and rounds.

In torch 2.13, torchrun keeps one store for all attempts. After a restart, processes find old keys
in it: addresses of gloo, to which they cannot connect or for which they wait half an hour, and
counters that do not start at 0. So the ranks of an attempt agree on a new name, and use it as a
prefix of their keys::

    rank 1   takes its next number -----------> | asked/1: 2     (1 was of a process that has died)
    rank 0   makes a name, answers every number | answer/1/1 = name, answer/1/2 = name
    rank 1   waits for the answer to its number | name/ready/1
    rank 0   continues when all others are ready

With many ranks, each asks its parent in a tree (`MergeTree`). The parent answers when it has the
name itself, and is ready when its children are. TORCHELASTIC_RESTART_COUNT cannot be used instead:
it differs between machines with different numbers of failures.

In a round, each rank contributes a payload, and all get the merged result. It also uses a tree, so
that a rank handles at most as many keys as the fan-in. Round 3 of a topic, where 2 and 3 are the
children of rank 1::

    rank 2   its payload -----------------------> | topic/3/2
    rank 3   its payload -----------------------> | topic/3/3
    rank 1   that it has arrived ---------------> | topic/3/1/here
             waits for 2 and 3, reads, merges --> | topic/3/1
    rank 0   ... its children, merges ----------> | topic/3/result      read by all

Each rank has the same timeout, counted from its own start of the round.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from vescale_fsdp import compat, waiting

FAN_IN = 16


class MergeTree:
    """The tree of ranks: each waits for its children.

    It is as shallow as the fan-in allows. All subtrees but the last are full.
    """

    def __init__(self, size: int, fan_in: int = FAN_IN) -> None:
        self._size, self._fan_in = size, fan_in
        self._width = 1  # of the subtrees of the root's children
        while 1 + fan_in * self._width < size:
            self._width = 1 + fan_in * self._width

    def parent(self, number: int) -> int | None:
        """None for the root. O(depth)."""
        return self._place(number)[0]

    def children(self, number: int) -> range:
        """At most ``fan_in`` of them, ascending. O(depth)."""
        return self._place(number)[1]

    def _place(self, number: int) -> tuple[int | None, range]:
        parent, start, stop, width = None, 0, self._size, self._width
        while start != number:
            parent = start
            start += 1 + (number - start - 1) // width * width
            stop = min(start + width, stop)
            width = (width - 1) // self._fan_in
        return parent, range(start + 1, stop, max(width, 1))


Merge: TypeAlias = Callable[[list[str]], str]
Finish: TypeAlias = Callable[[str], str]
_Pair = TypeVar("_Pair", bound=Sequence[Any])
MAX_NAMED = 16  # of ranks that are absent: to look for each costs the store a few messages


class AbsentError(RuntimeError):
    """One or several ranks did not take part in time.

    Attributes:
        numbers: their positions in the list of ranks; first those that others wait for.
    """

    def __init__(self, numbers: Sequence[int], timeout_s: float) -> None:
        who = f"rank {numbers[0]}" + " and others" * (len(numbers) > 1)
        super().__init__(f"{who} has not come within {timeout_s:.0f} s")
        self.numbers = numbers


def first_and_other(pairs: Iterable[_Pair]) -> list[_Pair]:
    """Return the first pair, and the first pair with another left side, if any.

    It is associative: applied to its results for parts of a list, it gives the result for the list.
    """
    pairs = list(pairs)
    return pairs[:1] + [pair for pair in pairs if pair[0] != pairs[0][0]][:1]


class Rounds:
    """Takes part in rounds for this rank. Its only state are counters.

    Args:
        store: a new store (see `store_for`), so that all ranks count from zero.
        ranks: global ranks, the same list on all of them. The first one is the root.
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
        """Merge the payloads of all ranks, and return the result on every rank. Blocking.

        Cost: three operations of the store; six for a rank with children, four for the root. Each
        is on at most as many keys as the fan-in.

        Args:
            merge: merges payloads in the order of ranks. Each is a rank's payload or the result of
                a merge for consecutive ranks. Must be associative.
            finish: converts the last payload to the result, on the first rank. None: no conversion.

        Raises:
            AbsentError: a rank did not take part in time, or the store has closed.
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
        """Find the absent ranks in the subtree of ``number``, its root first.

        Cost: a few operations of the store for each absent rank, and for each on the path to it.
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
    """Return the key of the payload of a rank, merged with those of its subtree."""
    return f"{place}/{number}"


def _here(place: str, number: int) -> str:
    """Return the key by which a rank that waits for its children says that it has arrived."""
    return f"{place}/{number}/here"


def _result(place: str) -> str:
    return f"{place}/result"


_PLACE = "vescale_fsdp/attempt"
_POLL_S, _LONGEST_POLL_S = 0.001, 0.05  # at first, and after some that were in vain
_TIMEOUT = datetime.timedelta(minutes=30)  # torch's, for gloo
_STORES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = weakref.WeakKeyDictionary()


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """Call it in place of ``torch.distributed.init_process_group`` in a script for torchrun.

    Under ``torchrun --max-restarts`` each attempt gets a fresh store; everywhere else, and where
    ``options`` say how the processes find each other, it is torch's function.

    Args:
        backend: as in torch.
        options: torch's other arguments.
    """
    is_told = {"store", "init_method", "rank", "world_size"} & options.keys()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not is_told:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout = options.get("timeout") or _TIMEOUT
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=False,
            timeout=timeout,
        )
        name = agree_on_name(store, _PLACE, rank, world_size, timeout.total_seconds())
        options |= {
            "store": PrefixStore(f"{_PLACE}/{name}", store),
            "rank": rank,
            "world_size": world_size,
        }
    dist.init_process_group(backend, **options)


def store_for(ranks: list[int], timeout_s: float) -> compat.Store:
    """The default group's store, under a name of these ranks in this attempt.

    Collective among them at the first call; a few messages per rank.

    Args:
        ranks: global ones, in an order that all of them give. This rank is among them.

    Raises:
        AbsentError: one of them did not take part in time.
    """
    world = dist.group.WORLD
    assert world is not None, "whoever has a group has initialised torch.distributed"
    known = _STORES.setdefault(world, {})
    key = hashlib.sha256(json.dumps(ranks).encode()).hexdigest()[:16]
    if key not in known:
        whole, place = compat.default_store(), f"{_PLACE}/of/{key}"
        me = ranks.index(dist.get_rank())
        name = agree_on_name(whole, place, me, len(ranks), timeout_s)
        known[key] = PrefixStore(f"{place}/{name}", whole)
    store: compat.Store = known[key]
    return store


def agree_on_name(store: Any, place: str, rank: int, size: int, timeout_s: float) -> str:
    """Return a new name that is the same on all living ranks. Collective.

    Cost: four operations of the store per rank. A rank with children has two more, one for each
    child, and two for each child that is not ready, every 50 ms or more often.

    Args:
        place: prefix for the keys of the agreement itself.
        rank: this rank, one of ``size``.

    Raises:
        AbsentError: a rank did not take part in time.
    """
    return _Naming(store, place, size, timeout_s).agree(rank)


class _Naming:
    """One rank's part in an agreement on a name. Arguments as in `agree_on_name`."""

    def __init__(self, store: Any, place: str, size: int, timeout_s: float) -> None:
        self._store, self._place, self._timeout_s = store, place, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._tree = MergeTree(size)

    def agree(self, rank: int) -> str:
        """Return the name."""
        parent = self._tree.parent(rank)
        name = secrets.token_hex(8) if parent is None else self._ask(rank, parent)
        children = self._tree.children(rank)
        if children:
            if parent is not None:
                self._store.set(self._here(name, rank), "")
            self._answer(name, children)
        if parent is not None:
            self._store.set(self._ready(name, rank), "")
        return name

    def _ask(self, rank: int, parent: int) -> str:
        number = self._store.add(self._asked(rank), 1)
        answer = self._answer_to(rank, number)
        try:
            compat.store_wait(self._store, answer, self._timeout_s)
        except dist.DistStoreError as error:
            raise AbsentError([self._silent(parent)], self._timeout_s) from error
        return str(self._store.get(answer).decode())

    def _answer(self, name: str, children: Sequence[int]) -> None:
        """Answer the children until they are ready. A restarted child may ask a second time."""
        answered, pause_s = dict.fromkeys(children, 0), _POLL_S
        while True:
            for child, last in list(answered.items()):
                for number in range(last + 1, self._store.add(self._asked(child), 0) + 1):
                    self._store.set(self._answer_to(child, number), name)
                    answered[child], pause_s = number, _POLL_S
                if answered[child] and self._is_there(self._ready(name, child)):
                    del answered[child]
            if not answered:
                return
            if time.monotonic() > self._deadline:
                raise AbsentError([self._missing(name, min(answered))], self._timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _silent(self, rank: int) -> int:
        """Find the rank for whose answer the children of ``rank`` wait: it, or one above it.

        A rank waits if it has asked and its last number has no answer.
        """
        parent = self._tree.parent(rank)
        number = 0 if parent is None else self._store.add(self._asked(rank), 0)
        if parent is None or not number or self._is_there(self._answer_to(rank, number)):
            return rank
        return self._silent(parent)

    def _missing(self, name: str, rank: int) -> int:
        """Find the rank for which the parent of ``rank`` waits: it, or one below it."""
        if self._is_there(self._here(name, rank)):
            for child in self._tree.children(rank):
                if not self._is_there(self._ready(name, child)):
                    return self._missing(name, child)
        return rank

    def _is_there(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _asked(self, rank: int) -> str:
        return f"{self._place}/asked/{rank}"

    def _answer_to(self, rank: int, number: int) -> str:
        return f"{self._place}/answer/{rank}/{number}"

    def _here(self, name: str, rank: int) -> str:
        return f"{self._place}/{name}/here/{rank}"

    def _ready(self, name: str, rank: int) -> str:
        return f"{self._place}/{name}/ready/{rank}"
