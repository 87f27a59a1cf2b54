"""Ranks agree through the store, before any collective that a disagreement would hang.

A collective between ranks that have different plans hangs, aborts a process from a foreign
thread, or returns garbage. The store (a small key-value server that ``init_process_group`` has
set up) does none of that: each rank writes what it has, the first rank compares, all read the
verdict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import torch.distributed as dist

from vescale_fsdp import compat
from vescale_fsdp.engine.attempts import AbsentError, store_for
from vescale_fsdp.errors import RankMismatchError

__all__ = ["LONG_TIMEOUT_S", "agree", "exchange"]

LONG_TIMEOUT_S = 600.0  # ranks may load data or weights of different size before they arrive


def exchange(
    topic: str,
    payload: str,
    group: dist.ProcessGroup | list[int],
    merge: Callable[[list[str]], str],
    *,
    timeout_s: float = LONG_TIMEOUT_S,
) -> str:
    """Give ``merge`` the payloads of all ranks of ``group``, in rank order, on its first rank.

    ``group`` may be a list of global ranks, for which there is no group yet.

    Returns what ``merge`` returned, on every rank. Blocking; one write and one read per rank,
    one read per rank more on the first. Every rank must call it the same number of times. With the
    backend "fake", torch's stand-in for many ranks in one process, the caller is alone.

    Raises:
        RankMismatchError: some rank did not come within ``timeout_s`` seconds.
    """
    ranks = _ranks_of(group)
    me = dist.get_rank()
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return merge([payload])
    try:
        store = store_for(ranks, timeout_s)
    except AbsentError as error:
        raise _absent(topic, ranks[error.rank], timeout_s) from error
    # The store counts, so that a restarted process group starts from zero on every rank.
    turn = store.add(f"{topic}/turn/{me}", 1)
    store.set(f"{topic}/{turn}/{me}", payload)
    if me == ranks[0]:
        payloads = [
            _read(store, f"{topic}/{turn}/{rank}", topic, rank, timeout_s) for rank in ranks
        ]
        store.set(f"{topic}/{turn}/result", merge(payloads))
    return _read(store, f"{topic}/{turn}/result", topic, ranks[0], timeout_s)


def agree(
    topic: str,
    entries: list[str],
    group: dist.ProcessGroup | list[int],
    advice: str,
    *,
    timeout_s: float = LONG_TIMEOUT_S,
) -> None:
    """Raise on every rank unless all ranks of ``group`` have the same entries, in order.

    Digests are compared first; entries travel only to name the first difference. The error says
    what differs, and ends with ``advice``.

    Raises:
        RankMismatchError: with the first entry that differs, and what two ranks have there.
    """
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()

    def first_other(digests: list[str]) -> str:
        others = [i for i, d in enumerate(digests) if d != digests[0]]
        return json.dumps(others[:1])

    found = json.loads(exchange(topic, digest, group, first_other, timeout_s=timeout_s))
    if not found:
        return
    ranks = _ranks_of(group)
    first, other = ranks[0], ranks[found[0]]
    speaks = dist.get_rank() in (first, other)
    payload = json.dumps(entries if speaks else None)

    def difference(payloads: list[str]) -> str:
        mine, theirs = json.loads(payloads[0]), json.loads(payloads[found[0]])
        return _first_difference(first, mine, other, theirs)

    text = exchange(f"{topic} difference", payload, group, difference)
    raise RankMismatchError(f"ranks disagree about the {topic}: {text}. {advice}")


def _ranks_of(group: dist.ProcessGroup | list[int]) -> list[int]:
    return group if isinstance(group, list) else dist.get_process_group_ranks(group)


def _first_difference(rank_a: int, a: list[str], rank_b: int, b: list[str]) -> str:
    for i in range(max(len(a), len(b))):
        left = a[i] if i < len(a) else "nothing more"
        right = b[i] if i < len(b) else "nothing more"
        if left != right:
            where = f"at entry {i}, " if max(len(a), len(b)) > 1 else ""
            return f"{where}rank {rank_a} has {left} and rank {rank_b} has {right}"
    return "no entry differs"


def _read(store: compat.Store, key: str, topic: str, rank: int, timeout_s: float) -> str:
    try:
        compat.store_wait(store, key, timeout_s)
    except dist.DistStoreError as error:
        raise _absent(topic, rank, timeout_s) from error
    return store.get(key).decode()


def _absent(topic: str, rank: int, timeout_s: float) -> RankMismatchError:
    return RankMismatchError(
        f"rank {rank} did not come to compare the {topic} within {timeout_s:.0f} s: it has "
        "died, hangs, or runs other code than this rank. Its log says which"
    )
