"""Messages between ranks about a step, through the store: while it runs, and after it failed.

Settling: the ranks merge their records of a pass (`program.record`) in a round, at its end. A pass
of a new kind also begins with one, and so does other work that all ranks do together (the save of a
checkpoint, `Ranks.barrier`): ranks that have come to different places are told so before anything
is sent.
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

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from vescale_fsdp.dbuffer import Comm
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.program import Record, merge
from vescale_fsdp.ranks import Ranks, limit_s, merge_pairs, notes, over, waits


def settle(mine: Record, axes: Axes, timeout_s: float | None) -> Record:
    """Merge the records of all ranks. Collective over the ranks of ``axes``: one round.

    Raises:
        RankMismatchError: on every rank, if passes differ or one rank has an error.
    """

    def together(said: list[dict[str, Any]]) -> dict[str, Any]:
        return merge([Record(**each) for each in said]).__dict__

    return Record(**_ranks(axes).step(mine.__dict__, together, timeout_s=timeout_s))


def stall(axes: Axes, backward: str) -> None:
    """Record that this rank is behind in a backward. One store operation."""
    _ranks(axes).tell(f"stalled/{backward}")


def is_stalled(axes: Axes, backward: str) -> bool:
    """Whether a rank has recorded that it is behind. At most two store operations."""
    return _ranks(axes).heard(f"stalled/{backward}") is not None


def is_elsewhere(axes: Axes, step: str) -> bool:
    """Whether another rank waits in the next round, in another pass than ``step``."""
    return _ranks(axes).is_elsewhere(step)


def _ranks(axes: Axes) -> Ranks:
    # Ranks of one axis have a group, whose own limit holds.
    return over(axes.groups[0] if len(axes.groups) == 1 else axes.ranks)


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
    ours = [comm.gather_group, *comm.reducing_groups]

    try:
        with notes.entered("in a step that it has left by an exception"):
            found = over(group).exchange(
                "end of a step", [[issued, dist.get_rank()]], merge_pairs, _difference,
                timeout_s=min(timeout_s, limit_s()),
            )  # fmt: skip
    except RankMismatchError as error:
        waits.abort("", ours)
        raise RankMismatchError(
            "an exception has ended a step on this rank, and not on all others: "
            f"{error} They wait for this rank in collectives of that step. {_WAY_OUT}"
        ) from error
    if found:
        waits.abort(found, ours)
        raise RankMismatchError(
            "an exception has ended a step on all ranks, but not at the same place: "
            f"{found}. What one of them has begun has no partner on the other. {_WAY_OUT}"
        )


def _difference(pairs: list[tuple[list[list[int]], int]]) -> str:
    """Return what two ranks have started, if it differs; else ""."""
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
