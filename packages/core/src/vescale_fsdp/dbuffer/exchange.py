"""Exchange: every rank sends a part to every other one, as sends and receives of their own.

A gather is that, and so is an all-to-all. In gloo's own, what a rank sends lies in front of its
note that it is ready to receive, in one stream; so its peer begins to send only when it has
received, and data flows one way at a time. Here all receives are posted first. At 1 Gbit/s that
is 950 Mbit/s each way in place of 520 to 630, for half of the processor time
(docs/design/performance.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from vescale_fsdp import waiting
from vescale_fsdp.backends import backend_name

# Of the part for each rank. For shorter ones one call of a collective is enough.
SHORTEST_BYTES = 1 << 13
_NUM_TAGS = 1 << 22
_WHAT = "an exchange"


def is_worthwhile(part: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether to make an exchange rather than a collective, for ``part`` to each rank.

    The same on all ranks, if their parts are of one size.
    """
    is_long = part.device.type == "cpu" and part.nbytes >= SHORTEST_BYTES
    return is_long and backend_name(group, "cpu") == "gloo"


class Exchange:
    """An exchange under way. Waits like a ``Work``, and holds its tensors until then.

    Args:
        sent: what goes to each rank, in the order of ranks; not to be written to before `wait`.
        received: where to put what comes from each rank; not to be touched before `wait`.
            In both nothing is done with the entry of this rank.
        rank: this one, in ``group``.
        group: of the ranks; its backend is gloo. All of them make the same exchange.

    Cost: one send and one receive for each other rank; nothing is copied.
    """

    def __init__(
        self,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._tensors: tuple[Sequence[torch.Tensor], ...] = (sent, received)
        self._works: list[dist.Work | None] = []
        self._group = group
        try:
            self._start(sent, received, rank)
        except RuntimeError as error:
            raise waiting.failure(error, group, _WHAT, time.monotonic()) from error

    def _start(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], rank: int
    ) -> None:
        # A tag by the size: gloo ends the process where a message is longer than what receives it.
        size, group = len(sent), self._group
        for distance in range(1, size):
            peer = (rank - distance) % size
            part = received[peer]
            work = dist.irecv(part, group=group, group_src=peer, tag=part.nbytes % _NUM_TAGS)
            self._works.append(work)
        for distance in range(1, size):  # the next one first, so that not all send to the same
            peer = (rank + distance) % size
            part = sent[peer]
            work = dist.isend(part, group=group, group_dst=peer, tag=part.nbytes % _NUM_TAGS)
            self._works.append(work)

    def wait(self) -> None:
        """Return when all has arrived, and what was sent may be written to.

        Raises:
            RankMismatchError: a rank has not come in time, or is no longer connected.
        """
        started, deadline = time.monotonic(), waiting.deadline_for(self._group)
        try:
            for work in self._works:
                assert work is not None, "this rank is in the group"
                waiting.wait_until(work, deadline)
        except RuntimeError as error:
            raise waiting.failure(error, self._group, _WHAT, started) from error
        waiting.finish(_WHAT)
        self._works, self._tensors = [], ()
