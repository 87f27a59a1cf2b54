"""Compares plans between ranks through the store, before collectives.

A collective between ranks with different plans hangs, aborts a process in another thread, or
returns wrong data. With the store (the key-value server of ``init_process_group``) this cannot
happen: each rank writes its entries, the ranks compare them along a tree (`store.Rounds`), and all
read the result. Before they run a model they compare its `fingerprint_of`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from vescale_fsdp import notes, waiting
from vescale_fsdp.backends import is_fake
from vescale_fsdp.engine.store import (
    MAX_NAMED,
    AbsentError,
    Finish,
    Merge,
    Rounds,
    first_and_other,
    store_for,
)
from vescale_fsdp.engine.unfilled import plain_buffers
from vescale_fsdp.errors import RankMismatchError

LONG_TIMEOUT_S = 600.0  # ranks may load data or weights of different size before they arrive
_ROUNDS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Rounds]]
_ROUNDS = weakref.WeakKeyDictionary()


def exchange(
    topic: str,
    payload: str,
    group: dist.ProcessGroup | list[int],
    merge: Merge,
    finish: Finish | None = None,
    *,
    timeout_s: float | None = None,
) -> str:
    """Merge the payloads of all ranks of ``group``, and return the result on every rank. Blocking.

    ``group`` may be a list of global ranks for which there is no process group yet.

    Every rank must call it the same number of times. With the backend "fake" there is only this
    rank. Cost: a few operations of the store per rank, for any number of ranks (`store.Rounds`).

    Args:
        merge: merges payloads in rank order. They may be results of a merge.
        finish: converts the last payload to the result, on the first rank. None: no conversion.
        timeout_s: for the other ranks. None: they are in the same step, and have the timeout of a
            collective (`waiting`); after it no rank can continue.

    Raises:
        RankMismatchError: a rank did not take part in time.
    """
    ranks = group if isinstance(group, list) else dist.get_process_group_ranks(group)
    if len(ranks) == 1 or is_fake():
        merged = merge([payload])
        return merged if finish is None else finish(merged)
    within_s = _limit_s(group, timeout_s)
    begun = time.monotonic()
    try:
        rounds = _rounds_of(ranks, within_s)
        left = within_s - (time.monotonic() - begun)
        return rounds.exchange(topic, payload, merge, left, finish)
    except AbsentError as error:
        text = _absent(topic, ranks, error, within_s)
        if timeout_s in (None, LONG_TIMEOUT_S):
            note = f"gave up {notes.where()}: {text}"
            text = f"{text}. Rank {dist.get_rank()} is {notes.where()}."
            if timeout_s is None:  # others may wait in a collective of the same group
                groups = [] if isinstance(group, list) else [group]
                text = f"{text} {waiting.report(ranks, note, groups)}"
            text = f"{text} {waiting.advice(timed_out=True)}"
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

    Digests are compared first. Entries are sent only to name the first difference. The error says
    what differs, and ends with ``advice``.

    Args:
        timeout_s: as in `exchange`.

    Raises:
        RankMismatchError: with the first entry that differs, and what two ranks have there.
    """
    agree_on([Subject(topic, entries, advice)], group, timeout_s=timeout_s)


def agree_on(
    subjects: Sequence[Subject],
    group: dist.ProcessGroup | list[int],
    *,
    timeout_s: float | None = None,
) -> None:
    """Call `agree` for several subjects in one round. The error names the first that differs.

    Raises:
        RankMismatchError: as in `agree`.
    """
    topic = " and the ".join(subject.topic for subject in subjects)
    payload = Digests.of(subjects, dist.get_rank())
    answer = exchange(topic, payload, group, Digests.merge, timeout_s=timeout_s)
    differing = Digests.first_differing(answer)
    if differing is not None:
        index, ranks = differing
        subject = subjects[index]
        text = _difference(subject, ranks, group, timeout_s)
        raise RankMismatchError(
            f"ranks disagree about the {subject.topic}: {text}. {subject.advice}"
        )


@dataclass(frozen=True)
class Subject:
    """A list of entries that must be the same on all ranks, in order, and what to do if they
    differ."""

    topic: str
    entries: list[str]
    advice: str


class Digests:
    """The messages about subjects while nothing differs: for each subject, which ranks have which
    digest."""

    @staticmethod
    def of(subjects: Sequence[Subject], me: int) -> str:
        """Return the payload of a rank."""
        texts = [json.dumps(subject.entries).encode() for subject in subjects]
        return json.dumps([[[hashlib.sha256(text).hexdigest(), me]] for text in texts])

    @staticmethod
    def merge(payloads: list[str]) -> str:
        """Return for each subject the first rank with its digest, and the first with another."""
        by_subject = zip(*map(json.loads, payloads), strict=True)
        return json.dumps([first_and_other(itertools.chain(*each)) for each in by_subject])

    @staticmethod
    def first_differing(answer: str) -> tuple[int, list[int]] | None:
        """Return index and two ranks of the first subject that differs; None if none does."""
        for index, pairs in enumerate(json.loads(answer)):
            if len(pairs) > 1:
                return index, [rank for _, rank in pairs]
        return None


def _difference(
    subject: Subject,
    speakers: list[int],
    group: dist.ProcessGroup | list[int],
    timeout_s: float | None,
) -> str:
    """Return a sentence with the first difference of a subject. Collective over ``group``."""
    me = dist.get_rank()
    said: list[Any] = [[me, subject.entries]] if me in speakers else []

    def merge(payloads: list[str]) -> str:
        return json.dumps([*itertools.chain(*map(json.loads, payloads))])

    def finish(merged: str) -> str:
        (rank_a, a), (rank_b, b) = json.loads(merged)
        return _first_difference(rank_a, a, rank_b, b)

    topic = f"{subject.topic} difference"
    return exchange(topic, json.dumps(said), group, merge, finish, timeout_s=timeout_s)


def _rounds_of(ranks: list[int], timeout_s: float) -> Rounds:
    """Return the rounds of these ranks. With a new process group every rank counts from zero."""
    world = dist.group.WORLD
    assert world is not None, "whoever has a group has initialised torch.distributed"
    known, key = _ROUNDS.setdefault(world, {}), tuple(ranks)
    if key not in known:
        known[key] = Rounds(store_for(ranks, timeout_s), ranks, dist.get_rank())
    return known[key]


def _first_difference(rank_a: int, a: list[str], rank_b: int, b: list[str]) -> str:
    for i in range(max(len(a), len(b))):
        left = a[i] if i < len(a) else "nothing more"
        right = b[i] if i < len(b) else "nothing more"
        if left != right:
            where = f"at entry {i}, " if max(len(a), len(b)) > 1 else ""
            return f"{where}rank {rank_a} has {left} and rank {rank_b} has {right}"
    return "no entry differs"


def _limit_s(group: dist.ProcessGroup | list[int], timeout_s: float | None) -> float:
    """Return the timeout in seconds. The user may set a longer one for the first round."""
    if timeout_s is None:
        if isinstance(group, list):
            return waiting.limit_s()
        timeout = waiting.timeout_of(group)
        limit = waiting.limit_s(group)
        return limit if timeout is None else min(limit, timeout.total_seconds())
    longer = waiting.limit_s() if timeout_s == LONG_TIMEOUT_S else 0.0
    return max(timeout_s, 0.0 if math.isinf(longer) else longer)


def _absent(topic: str, ranks: list[int], error: AbsentError, timeout_s: float) -> str:
    absent = [str(ranks[number]) for number in error.numbers]
    more = " and others" if len(absent) > MAX_NAMED else ""
    who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent[:MAX_NAMED])}{more}"
    return (
        f"{who} did not come to compare the {topic} within {timeout_s:.0f} s: it has "
        "died, hangs, or runs other code than this rank. Its log says which"
    )


if TYPE_CHECKING:
    from vescale_fsdp.engine.unit import Unit

_SAME_FLAGS = "Call requires_grad_ with the same values on every rank, before the same backward"


def fingerprint_of(units: list[Unit]) -> list[str]:
    """Return what must be the same on every rank, one entry per unit and parameter."""
    entries = []
    for unit in units:
        entries.append(
            f"unit {unit.fqn!r} (reshard_after_forward={unit.reshard_after_forward}, in "
            f"{unit.num_parts} parts, {unit.mp_policy}, unused={unit.unused!r}, "
            f"in_flight={unit.in_flight}, broadcast_buffers={unit.broadcasts_buffers}, {unit.row})"
        )
        for module in (ref() for ref in unit.module_refs if unit.broadcasts_buffers):
            assert module is not None, "somebody is calling it"
            for name, buffer in plain_buffers(module).items():
                entries.append(f"buffer {name!r} (shape {tuple(buffer.shape)}, {buffer.dtype})")
        for group in unit.groups:
            plan = f"layout {group.layout.digest[:12]} over {group.num_shards} ranks"
            if group.compute_dtype is not None:
                plan += f", computed in {group.compute_dtype}"
            for slot, (gather, reduce) in zip(group.slots, group.codings, strict=True):
                travels = f", gathered as {gather}" if gather else ""
                travels += f", reduced as {reduce}" if reduce else ""
                entries.append(
                    f"parameter {slot.fqn!r} (shape {tuple(slot.shape)}, {slot.sharded.dtype}, "
                    f"requires_grad={slot.sharded.requires_grad}, {plan}{travels})"
                )
    return entries


def agree_on_frozen(changed: list[str], group: dist.ProcessGroup) -> None:
    """Compare which parameters are frozen in groups with trainable ones, after a change.

    Raises:
        RankMismatchError: another rank has other frozen parameters, or no change.
    """
    try:
        agree("frozen parameters", changed, group, _SAME_FLAGS)
    except RankMismatchError as error:
        if str(error).startswith("ranks disagree"):
            raise
        raise RankMismatchError(
            f"the frozen parameters have changed on this rank since the last reduction "
            f"({changed}), and perhaps not on others: {error}. {_SAME_FLAGS}"
        ) from error
