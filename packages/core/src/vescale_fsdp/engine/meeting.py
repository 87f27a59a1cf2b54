"""The meeting of ranks that have left a step by an exception, before they go on.

What is under way of that step can only be waited for where every rank has issued its part. Two
ranks of which one has left out unit b, and that raise at the same place of a backward::

    rank 0   gathers c b a   reductions c
    rank 1   gathers c b a   reductions c b     <- would wait for this one for ever

So each tells the others, through the store, what it has issued so far. If all have issued the
same, everything under way ends, and the ranks drop the step and go on. If not, they cannot: what
one rank issues next would meet what the other has left.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import torch.distributed as dist

from vescale_fsdp import waiting
from vescale_fsdp.dbuffer import Comm
from vescale_fsdp.engine.agreement import exchange
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.rounds import first_and_other
from vescale_fsdp.errors import RankMismatchError

MEETING_TIMEOUT_S = 10.0  # ranks that have caught an exception in the same step come soon
_WAY_OUT = (
    "Let the exception end the process, and start all again from a checkpoint; or agree before the "
    "forward that all ranks leave the step out"
)


def meet(comms: Iterable[tuple[Axes, Comm]], timeout_s: float) -> None:
    """Return when all ranks are here, and have issued the same collectives.

    Else the connections between them are closed, so that no rank waits for what will not come.

    Args:
        comms: what the units of a model are on.
        timeout_s: for the other ranks to come.

    Raises:
        RankMismatchError: on every rank that is here.
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
    """What two ranks have issued, if it is not the same; empty if all have issued the same."""
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
