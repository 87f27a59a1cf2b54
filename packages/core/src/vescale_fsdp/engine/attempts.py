"""Keys of a store that no process before has used, and torch's ``init_process_group`` with them.

In torch 2.13 torchrun keeps one store for all attempts, and the processes use it. After a restart
they find in it what those before have left: addresses of gloo, to which they connect in vain or for
which they wait half an hour, and counters that have gone on. So the ranks of an attempt agree on a
name that nobody has used, and keep their keys under it::

    rank 1   takes its next number -----------> | asked/1: 2     (1 was of a process that has died)
    rank 0   makes a name, answers every number | answer/1/1 = name, answer/1/2 = name
    rank 1   waits for the answer to its own    | name/ready/1
    rank 0   goes on when all others are ready

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
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from vescale_fsdp import compat

__all__ = ["AbsentError", "agree_on_name", "init_process_group", "store_for"]

_PLACE = "vescale_fsdp/attempt"
_POLL_S = 0.01
_TIMEOUT = datetime.timedelta(minutes=30)  # torch's, for gloo
_STORES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = weakref.WeakKeyDictionary()


class AbsentError(RuntimeError):
    """A rank has not come in time.

    Attributes:
        rank: its number among those that were to agree.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        super().__init__(f"rank {rank} has not come within {timeout_s:.0f} s")
        self.rank = rank


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

    Args:
        place: for the keys of the agreement itself.
        rank: of ``size`` that agree.

    Raises:
        AbsentError: not all of them have come in time.
    """
    if rank > 0:
        number = store.add(f"{place}/asked/{rank}", 1)
        answer = f"{place}/answer/{rank}/{number}"
        try:
            compat.store_wait(store, answer, timeout_s)
        except dist.DistStoreError as error:
            raise AbsentError(0, timeout_s) from error
        name = str(store.get(answer).decode())
        store.set(f"{place}/{name}/ready/{rank}", "")
        return name
    name = secrets.token_hex(8)
    answered = dict.fromkeys(range(1, size), 0)
    deadline = time.monotonic() + timeout_s
    while answered:
        for other, last in list(answered.items()):
            for number in range(last + 1, store.add(f"{place}/asked/{other}", 0) + 1):
                store.set(f"{place}/answer/{other}/{number}", name)
                answered[other] = number
            if answered[other] and store.check([f"{place}/{name}/ready/{other}"]):
                del answered[other]
        if answered and time.monotonic() > deadline:
            raise AbsentError(min(answered), timeout_s)
        if answered:
            time.sleep(_POLL_S)
    return name
