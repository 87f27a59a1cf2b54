"""A store of keys that are new in each attempt of a job.

In torch 2.13, torchrun keeps one store for all attempts. After a restart, processes find old keys
in it: addresses of gloo, to which they cannot connect or for which they wait half an hour, and
counters that do not start at 0. So the ranks of an attempt agree on a new name, and use it as a
prefix of their keys::

    rank 1   has a token of its own, and asks --> | asked/7 = token  (1 to 6: of the dead)
    rank 0   makes a name, answers every token    | token = name
    rank 1   reads the answer, says that it has it| name/ready/1, name/num_ready + 1
    rank 0   continues when all others are ready

TORCHELASTIC_RESTART_COUNT cannot be used instead: it differs between machines with different
numbers of failures.
"""

from __future__ import annotations

import datetime
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from vescale_fsdp.ranks import waits

PLACE = "vescale_fsdp/attempt"
_POLL_S, _LONGEST_POLL_S = 0.001, 0.05  # at first, and after some that were in vain
_TIMEOUT = datetime.timedelta(minutes=30)  # torch's, for gloo


class AbsentError(RuntimeError):
    """One or several ranks did not take part in time.

    Attributes:
        numbers: their positions in the list of ranks; first those that others wait for.
        name: of the attempt, which the others may have.
    """

    def __init__(self, numbers: Sequence[int], timeout_s: float, name: str = "") -> None:
        who = f"rank {numbers[0]}" + " and others" * (len(numbers) > 1)
        super().__init__(f"{who} has not come within {timeout_s:.0f} s")
        self.numbers, self.name = numbers, name


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
        name = agree_on_name(store, PLACE, rank, world_size, timeout.total_seconds())
        options |= {
            "store": PrefixStore(f"{PLACE}/{name}", store),
            "rank": rank,
            "world_size": world_size,
        }
    dist.init_process_group(backend, **options)


def agree_on_name(store: Any, place: str, rank: int, size: int, timeout_s: float) -> str:
    """Return a new name that is the same on all living ranks. Collective.

    Cost: six operations of the store per rank. Rank 0 has two or three for each other rank, and one
    every 50 ms or more often.

    Args:
        place: prefix for the keys of the agreement itself.
        rank: this rank, one of ``size``.

    Raises:
        AbsentError: a rank did not take part in time.
    """
    if rank == 0:
        return _answer(store, place, size, timeout_s)
    token = secrets.token_hex(8)
    number = store.add(f"{place}/num_asked", 1)
    store.set(f"{place}/asked/{number}", token)
    try:
        waits.until_set(store, [f"{place}/{token}"], timeout_s)
    except dist.DistStoreError as error:
        raise AbsentError([0], timeout_s) from error
    name = str(store.get(f"{place}/{token}").decode())
    store.set(f"{place}/{name}/ready/{rank}", "")
    store.add(f"{place}/{name}/num_ready", 1)
    return name


def _answer(store: Any, place: str, size: int, timeout_s: float) -> str:
    """Answer all that ask, the dead among them, until the others of this attempt are ready."""
    name, deadline = secrets.token_hex(8), time.monotonic() + timeout_s
    num_seen, pending, pause_s = 0, set[str](), _POLL_S
    while store.add(f"{place}/{name}/num_ready", 0) < size - 1:
        waits.check()
        num_asked = store.add(f"{place}/num_asked", 0)
        pending |= {f"{place}/asked/{number + 1}" for number in range(num_seen, num_asked)}
        num_seen = num_asked
        # One that was killed after it took its number has not set its key.
        asked = [key for key in pending if store.check([key])]
        for key in asked:
            store.set(f"{place}/{store.get(key).decode()}", name)
        pending -= {*asked}
        if time.monotonic() > deadline:
            ready = (f"{place}/{name}/ready/{rank}" for rank in range(1, size))
            absent = [rank for rank, key in enumerate(ready, 1) if not store.check([key])]
            raise AbsentError(absent or [1], timeout_s, name)
        pause_s = _POLL_S if asked else min(2 * pause_s, _LONGEST_POLL_S)
        time.sleep(pause_s)
    return name
