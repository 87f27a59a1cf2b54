"""The inner shard of HSDP, where sharded parameters are also sharded over the outer axis.

Four ranks as 2 x 2, a full buffer of four parts::

                     sharded     in a step: the inner shard     full buffer
    rank (0, 0)      part 0      parts 0 1                      parts 0 1 2 3
    rank (1, 0)      part 1      parts 0 1                      parts 0 1 2 3
    rank (0, 1)      part 2          parts 2 3                  parts 0 1 2 3
    rank (1, 1)      part 3          parts 2 3                  parts 0 1 2 3
                          |__________|  |__________________________|
                           outer axis      inner axis: as in HSDP
                           once a step

So each parameter and each gradient is sent over the slow axis once a step, and the optimizer's
states are sharded over all ranks. With a codec messages are gathered, first those of an inner
shard and then all. Each rank writes the message of its part, and all ranks read each message.
"""

from __future__ import annotations

import torch

from vescale_fsdp import devices
from vescale_fsdp.dbuffer import Codec, Comm, DBuffer
from vescale_fsdp.devices import Waitable


class InnerShard:
    """The inner shard of one group, in the dtype that it computes in, or as messages."""

    def __init__(self) -> None:
        self._values: torch.Tensor | None = None
        self._work: Waitable | None = None
        self._version: object = None

    def start_gather(
        self, buffer: DBuffer, outer: Comm, version: object, codec: Codec | None
    ) -> None:
        """Start to gather it over the outer axis, unless it is there for this ``version``.

        Args:
            buffer: of the parameters, sharded over all ranks.
            outer: the communicators of the outer axis.
            version: of the sharded weights.
            codec: writes the messages.

        Cost: one all-gather of ``outer.size`` resting shards or their messages, and memory for
        them until the weights change.
        """
        if self._version == version:
            return
        self.drop()
        shard, place = buffer.shard, outer.rank
        full = buffer.full.flat
        size, dtype = shard.numel(), full.dtype
        if codec is not None and size:
            size, dtype = codec.num_bytes(buffer.layout), torch.uint8
        values = torch.empty(outer.size * size, dtype=dtype, device=full.device)
        own = values[place * size : (place + 1) * size]

        def start() -> Waitable:
            if codec is None:
                devices.copy_async(own, shard)
            else:
                codec.encode(buffer.layout, buffer.rank, shard, own)
            return outer.all_gather(values, own)

        if values.numel():
            self._work = devices.start_beside(full.device, start)
        self._values, self._version = values, version

    @property
    def values(self) -> torch.Tensor:
        """The inner shard, flat; or its messages, one after the other. Not to be read yet."""
        assert self._values is not None, "start_gather comes first"
        return self._values

    def wait(self) -> None:
        """Wait for the values (on CUDA the current stream does, or has)."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def drop(self) -> None:
        """Forget the values: the weights at rest may have changed."""
        if self._work is not None:
            self._work.wait()
        self._values = self._work = self._version = None
