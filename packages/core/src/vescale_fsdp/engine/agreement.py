"""Ranks agree through the store, before any collective that a disagreement would hang.

A collective between ranks that have different plans hangs, aborts a process from a foreign
thread, or returns garbage. The store (a small key-value server that ``init_process_group`` has
set up) does none of that: each rank writes what it has, the first rank compares, all read the
verdict.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable

import torch.distributed as dist

from vescale_fsdp import compat, waiting
from vescale_fsdp.backends import is_fake
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
    timeout_s: float | None = None,
) -> str:
    """Give ``merge`` the payloads of all ranks of ``group``, in rank order, on its first rank.

    ``group`` may be a list of global ranks, for which there is no group yet.

    Returns what ``merge`` returned, on every rank. Blocking; one write and one read per rank,
    one read per rank more on the first. Every rank must call it the same number of times. With the
    backend "fake", torch's stand-in for many ranks in one process, the caller is alone.

    Args:
        timeout_s: for the other ranks to come. None: they are in the same step, and have as long as
            in a collective (`waiting`); if one does not come, no rank can go on.

    Raises:
        RankMismatchError: some rank did not come in time.
    """
    ranks = _ranks_of(group)
    me = dist.get_rank()
    if len(ranks) == 1 or is_fake():
        return merge([payload])
    within_s = _limit_s(group, timeout_s)
    begun = time.monotonic()
    try:
        store = store_for(ranks, within_s)
    except AbsentError as error:
        raise RankMismatchError(_absent(topic, [ranks[error.rank]], within_s)) from error
    # The store counts, so that a restarted process group starts from zero on every rank.
    turn = store.add(f"{topic}/turn/{me}", 1)
    store.set(f"{topic}/{turn}/{me}", payload)
    keys = {rank: f"{topic}/{turn}/{rank}" for rank in ranks}
    result = f"{topic}/{turn}/result"

    def read(key: str) -> str:
        left = within_s - (time.monotonic() - begun)
        waiting.store_wait(store, key, left, ranks, f"the comparison of the {topic}")
        return str(store.get(key).decode())

    try:
        if me == ranks[0]:
            store.set(result, merge([read(key) for key in keys.values()]))
        return read(result)
    except dist.DistError as error:
        away = [rank for rank, key in keys.items() if not _is_there(store, key)] or ranks[:1]
        text = _absent(topic, away, within_s)
        if timeout_s is None:
            note = f"gave up after {within_s:.0f} s: {text}"
            text = f"{text}. This rank is {waiting.where()}. {waiting.report(ranks, note)}"
        raise RankMismatchError(text) from error


def agree(
    topic: str,
    entries: list[str],
    group: dist.ProcessGroup | list[int],
    advice: str,
    *,
    timeout_s: float | None = None,
) -> None:
    """Raise on every rank unless all ranks of ``group`` have the same entries, in order.

    Digests are compared first; entries travel only to name the first difference. The error says
    what differs, and ends with ``advice``.

    Args:
        timeout_s: as of `exchange`.

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

    text = exchange(f"{topic} difference", payload, group, difference, timeout_s=timeout_s)
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


def _limit_s(group: dist.ProcessGroup | list[int], timeout_s: float | None) -> float:
    """How long the ranks have, in seconds. A user may ask for more where they first arrive."""
    if timeout_s is None:
        assert not isinstance(group, list), "ranks in the same step have a group"
        timeout = waiting.timeout_of(group)
        limit = waiting.limit_s(group)
        return limit if timeout is None else min(limit, timeout.total_seconds())
    longer = waiting.limit_s() if timeout_s == LONG_TIMEOUT_S else 0.0
    return max(timeout_s, 0.0 if math.isinf(longer) else longer)


def _is_there(store: compat.Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except dist.DistError:
        return True  # nobody knows


def _absent(topic: str, ranks: list[int], timeout_s: float) -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return (
        f"{who} did not come to compare the {topic} within {timeout_s:.0f} s: it has "
        "died, hangs, or runs other code than this rank. Its log says which"
    )
