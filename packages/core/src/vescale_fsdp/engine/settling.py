"""Messages between ranks about a step, through the store: while it runs, and after it failed.

Settling: the ranks merge their records of a pass (`program.record`) in a round, at its end. A pass
of a new kind also begins with one, and so does other work that all ranks do together (the save of a
checkpoint): ranks that have come to different places are told so before anything is sent.
In addition, a rank that is behind with its reductions says so in the store, without waiting. Ranks
that have waited long for a reduction read this, but only in the first backward of a kind.

Meeting: ranks that have left a step with an exception meet before they continue. A running
collective of that step can end only if every rank has started its part. Example: two ranks raise at
the same place of a backward, and one has skipped unit b::

    rank 0   all-gathers c b a   reductions c
    rank 1   all-gathers c b a   reductions c b     <- would wait for this one for ever

So each rank tells the others what it has started. If all have started the same collectives, all of
these end, and the ranks drop the step and continue. If not, they cannot continue: the next
collective of one rank would be matched with an old one of another.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections import Counter
from collections.abc import Iterable

import torch.distributed as dist

from vescale_fsdp import compat, notes, waiting
from vescale_fsdp.backends import is_fake
from vescale_fsdp.dbuffer import Comm
from vescale_fsdp.engine.agreement import exchange
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.store import first_and_other, store_for
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.program import Record, merge

_STORE_S = 60.0  # for the store's name, which the ranks have agreed on before
_ROUNDS: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)


def come_together(step: str, *, timeout_s: float | None = None) -> None:
    """Return when all ranks of the default group have come to ``step``. Collective: one round.

    Args:
        step: what all ranks do now, in words; the same on all.
        timeout_s: for the other ranks, as in `exchange`.

    Raises:
        RankMismatchError: a rank did not come in time, or it has come to something else.
    """
    world = dist.group.WORLD
    assert world is not None, "there are other ranks"
    with notes.entered(f"in {step}"):
        _agreed(_merged(Record(step, rank=dist.get_rank()), world, timeout_s))


def settle(mine: Record, axes: Axes, timeout_s: float | None) -> Record:
    """Merge the records of all ranks. Collective over the ranks of ``axes``: one round.

    Raises:
        RankMismatchError: on every rank, if passes differ or one rank has an error.
    """
    if _is_shared(axes):
        _store(axes).set(f"settling/{_num_rounds()[tuple(axes.ranks)]}", mine.step)
    # Ranks of one axis have a group, whose own limit holds.
    ranks = axes.groups[0] if len(axes.groups) == 1 else axes.ranks
    said = _merged(mine, ranks, timeout_s)
    if _is_shared(axes):
        _num_rounds()[tuple(axes.ranks)] += 1
    return _agreed(said)


def _merged(mine: Record, ranks: dist.ProcessGroup | list[int], timeout_s: float | None) -> Record:
    def together(payloads: list[str]) -> str:
        return merge([Record.from_json(payload) for payload in payloads]).to_json()

    answer = exchange("next step", mine.to_json(), ranks, together, timeout_s=timeout_s)
    return Record.from_json(answer)


def _agreed(said: Record) -> Record:
    if said.wrong:
        raise RankMismatchError(
            f"ranks disagree about the next step: {said.wrong}. Run the same passes with the same "
            f"order of units on every rank; a rank may leave units out. {waiting.TOGETHER}"
        )
    return said


def stall(axes: Axes, backward: str) -> None:
    """Record that this rank is behind in a backward. One store operation."""
    if _is_shared(axes):
        _store(axes).set(f"stalled/{backward}", "")


def is_stalled(axes: Axes, backward: str) -> bool:
    """Whether a rank has recorded that it is behind. One store operation."""
    return _is_shared(axes) and bool(_store(axes).check([f"stalled/{backward}"]))


def is_elsewhere(axes: Axes, step: str) -> bool:
    """Whether another rank waits in the next round, in another pass than ``step``.

    Then it waits for this rank, which waits for it in another place. At most two store operations.
    """
    if not _is_shared(axes):
        return False
    store, key = _store(axes), f"settling/{_num_rounds()[tuple(axes.ranks)]}"
    return bool(store.check([key])) and store.get(key).decode() != step


def _is_shared(axes: Axes) -> bool:
    return len(axes.ranks) > 1 and not is_fake()


def _store(axes: Axes) -> compat.Store:
    return store_for(axes.ranks, _STORE_S)


def _num_rounds() -> Counter[tuple[int, ...]]:
    """Return the number of rounds that each set of ranks has made in this world."""
    world = dist.group.WORLD
    assert world is not None, "a model runs in it"
    return _ROUNDS.setdefault(world, Counter())


MEETING_TIMEOUT_S = 10.0  # ranks that have caught an exception in the same step come soon
_WAY_OUT = (
    "Let the exception end the process, and start all again from a checkpoint; or agree before the "
    "forward that all ranks leave the step out"
)


def meet(comms: Iterable[tuple[Axes, Comm]], timeout_s: float) -> None:
    """Wait until all ranks call this and have started the same collectives.

    Else the connections between them are closed, so that no rank waits forever.

    Args:
        comms: axes and communicators of a model's units.
        timeout_s: for the other ranks.

    Raises:
        RankMismatchError: on every rank that calls this.
    """
    for axes, comm in comms:
        along = [comm.issued] if axes.shard is not None else []
        along += [comm.issued_outside] if axes.replicate is not None else []
        for group, issued in zip(axes.groups, along, strict=True):
            _meet_along(group, issued.as_list(), comm, timeout_s)


def _meet_along(
    group: dist.ProcessGroup, issued: list[list[int]], comm: Comm, timeout_s: float
) -> None:
    ranks = dist.get_process_group_ranks(group)
    ours = [comm.gather_group, *comm.reducing_groups]

    def merge(payloads: list[str]) -> str:
        return json.dumps(first_and_other(itertools.chain(*map(json.loads, payloads))))

    try:
        payload = json.dumps([[issued, dist.get_rank()]])
        found = exchange("end of a step", payload, group, merge, _difference, timeout_s=timeout_s)
    except RankMismatchError as error:
        note = "has left its step by an exception, and met no other rank that has"
        report = waiting.report(ranks, note, ours)
        raise RankMismatchError(
            "an exception has ended a step on this rank, and not on all others: "
            f"{error}. {report} They wait for this rank in collectives of that step. {_WAY_OUT}"
        ) from error
    if found:
        waiting.close(ours, found)
        raise RankMismatchError(
            "an exception has ended a step on all ranks, but not at the same place: "
            f"{found}. What one of them has begun has no partner on the other. {_WAY_OUT}"
        )


def _difference(merged: str) -> str:
    """Return what two ranks have started, if it differs; else ""."""
    pairs: list[tuple[list[list[int]], int]] = json.loads(merged)
    if len(pairs) == 1:
        return ""
    (first, first_rank), (other, other_rank) = pairs
    counts = [[number for number, _ in issued] for issued in (first, other)]
    if counts[0] == counts[1]:
        return f"ranks {first_rank} and {other_rank} have issued collectives of other sizes"
    said = [
        f"rank {rank} has issued {gathers} gathers and {reductions} reductions so far"
        for rank, (gathers, reductions) in zip((first_rank, other_rank), counts, strict=True)
    ]
    return ", ".join(said)
