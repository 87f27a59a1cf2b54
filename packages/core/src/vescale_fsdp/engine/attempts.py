"""Keys of a store that no process before has used, and torch's ``init_process_group`` with them.

In torch 2.13 torchrun keeps one store for all attempts, and the processes use it. After a restart
they find in it what those before have left: addresses of gloo, to which they connect in vain or for
which they wait half an hour, and counters that have gone on. So the ranks of an attempt agree on a
name that nobody has used, and keep their keys under it::

    rank 1   takes its next number -----------> | asked/1: 2     (1 was of a process that has died)
    rank 0   makes a name, answers every number | answer/1/1 = name, answer/1/2 = name
    rank 1   waits for the answer to its own    | name/ready/1
    rank 0   goes on when all others are ready

Of many ranks each asks its parent in a tree (`merge_tree`), which answers once it has the name
itself, and is ready when its children are.

Not by TORCHELASTIC_RESTART_COUNT: it differs between machines that have failed differently often.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import secrets
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from vescale_fsdp import compat
from vescale_fsdp.engine.merge_tree import MergeTree

_PLACE = "vescale_fsdp/attempt"
_POLL_S, _LONGEST_POLL_S = 0.001, 0.05  # at first, and after some that were in vain
_TIMEOUT = datetime.timedelta(minutes=30)  # torch's, for gloo
_STORES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = weakref.WeakKeyDictionary()


class AbsentError(RuntimeError):
    """A rank, or several, have not come in time.

    Attributes:
        numbers: theirs among those that were to agree, those that others wait for first.
    """

    def __init__(self, numbers: Sequence[int], timeout_s: float) -> None:
        who = f"rank {numbers[0]}" + " and others" * (len(numbers) > 1)
        super().__init__(f"{who} has not come within {timeout_s:.0f} s")
        self.numbers = numbers


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
        AbsentError: one of them has not come in time.
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
    """A name that the live ranks share, and nobody had before. Collective.

    Four operations of the store per rank. One that has children: two more, one for each of them,
    and two for each that is not ready, every 50 ms at least.

    Args:
        place: for the keys of the agreement itself.
        rank: of ``size`` that agree.

    Raises:
        AbsentError: not all of them have come in time.
    """
    return _Naming(store, place, size, timeout_s).agree(rank)


class _Naming:
    """One rank's part in an agreement on a name; arguments as of `agree_on_name`."""

    def __init__(self, store: Any, place: str, size: int, timeout_s: float) -> None:
        self._store, self._place, self._timeout_s = store, place, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._tree = MergeTree(size)

    def agree(self, rank: int) -> str:
        """The name."""
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
        """Tell the children the name until they are ready. They may be asking for the 2nd time."""
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
        """Who keeps the children of ``rank`` waiting for an answer: it, or who does not answer it.

        A rank that waits has asked, and its last number has no answer.
        """
        parent = self._tree.parent(rank)
        number = 0 if parent is None else self._store.add(self._asked(rank), 0)
        if parent is None or not number or self._is_there(self._answer_to(rank, number)):
            return rank
        return self._silent(parent)

    def _missing(self, name: str, rank: int) -> int:
        """Who keeps the parent of ``rank`` waiting: it, or one below it."""
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
