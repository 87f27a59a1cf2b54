"""The shard that HSDP computes from, where what rests is cut over the outer axis too.

Four ranks as 2 x 2, a full buffer of four parts::

                     at rest     in a step: the inner shard     full buffer
    rank (0, 0)      part 0      parts 0 1                      parts 0 1 2 3
    rank (1, 0)      part 1      parts 0 1                      parts 0 1 2 3
    rank (0, 1)      part 2          parts 2 3                  parts 0 1 2 3
    rank (1, 1)      part 3          parts 2 3                  parts 0 1 2 3
                          |__________|  |__________________________|
                           outer axis      inner axis: as in HSDP
                           once a step

So the slow axis carries each parameter once a step and each gradient once, and the optimizer's
states are cut by all ranks.
"""

from __future__ import annotations

import torch

from vescale_fsdp.dbuffer import Comm, DBuffer, Waitable, copy_async, start_beside

__all__ = ["InnerShard"]


class InnerShard:
    """The inner shard of one group, in the dtype that it computes in."""

    def __init__(self) -> None:
        self._values: torch.Tensor | None = None
        self._work: Waitable | None = None
        self._version: object = None

    def start_gather(self, buffer: DBuffer, outer: Comm, version: object) -> None:
        """Start to gather it over the outer axis, unless it is there for this ``version``.

        Args:
            buffer: of the parameters, cut by all ranks.
            outer: the communicators of the outer axis.
            version: of the weights at rest.

        Cost: one all-gather of ``outer.size`` resting shards, and memory for them
        until the weights change.
        """
        if self._version == version:
            return
        self.drop()
        shard, place = buffer.shard, outer.rank
        full = buffer.full.flat
        values = torch.empty(outer.size * shard.numel(), dtype=full.dtype, device=full.device)
        own = values[place * shard.numel() : (place + 1) * shard.numel()]

        def start() -> Waitable:
            copy_async(own, shard)
            return outer.all_gather(values, own)

        if values.numel():
            self._work = start_beside(full.device, start)
        self._values, self._version = values, version

    def wait(self) -> torch.Tensor:
        """The inner shard, flat."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        assert self._values is not None, "start_gather comes first"
        return self._values

    def drop(self) -> None:
        """Forget the values: the weights at rest may have changed."""
        if self._work is not None:
            self._work.wait()
        self._values = self._work = self._version = None
