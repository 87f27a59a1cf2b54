"""What travels in a gather, where that is not the shard itself: messages that a codec writes.

::

    shard (rank k)  --encode-->  message k  --one even all-gather-->  all messages
    all messages    --decode, one per rank-->  the slices of the full buffer

All messages have the same size, so the gather stays one even collective. Without a codec a shard
travels as it is, cast to the dtype of the full buffer, and in place; `Cast` says the same in the
form of a codec, for tests and as the example to copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from vescale_fsdp.dbuffer.custom import ThenCopy
from vescale_fsdp.dbuffer.memory import SlabPool
from vescale_fsdp.dbuffer.streams import Waitable, start_beside
from vescale_fsdp.planner import ShardLayout

__all__ = ["Cast", "Codec", "start_encoded_gather"]


class Codec(Protocol):
    """Writes a shard as bytes, and reads such bytes into a slice of the full buffer.

    What it writes may depend on the shard and on where its tensors lie, and on nothing else: all
    ranks must read the same numbers from the same message.
    """

    def num_bytes(self, layout: ShardLayout) -> int:
        """The size of a message: the same for every rank. A multiple of 16 keeps NCCL fast."""

    def encode(
        self, layout: ShardLayout, rank: int, shard: torch.Tensor, message: torch.Tensor
    ) -> None:
        """Write ``shard`` (flat, ``layout.shard_size`` elements) to ``message`` (flat, uint8)."""

    def decode(
        self, layout: ShardLayout, rank: int, message: torch.Tensor, part: torch.Tensor
    ) -> None:
        """Read the message of ``rank`` into its ``part`` of the full buffer (flat)."""


class Cast:
    """The plain cast as a codec: a shard travels in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def num_bytes(self, layout: ShardLayout) -> int:
        """The shard in ``dtype``."""
        return layout.shard_size * self.dtype.itemsize

    def encode(
        self, layout: ShardLayout, rank: int, shard: torch.Tensor, message: torch.Tensor
    ) -> None:
        """One cast."""
        message.view(self.dtype).copy_(shard)

    def decode(
        self, layout: ShardLayout, rank: int, message: torch.Tensor, part: torch.Tensor
    ) -> None:
        """One cast."""
        part.copy_(message.view(self.dtype))


def start_encoded_gather(
    codec: Codec,
    layout: ShardLayout,
    shard: torch.Tensor,
    full: torch.Tensor,
    rank: int,
    pool: SlabPool,
    gather: Callable[[torch.Tensor, torch.Tensor], Any],
) -> ThenCopy:
    """Start to fill ``full`` from the messages of all ranks, which ``gather`` gathers.

    Cost: one all-gather of ``num_shards * codec.num_bytes(layout)`` bytes, memory for them until it
    is waited for, one encoding and ``num_shards`` decodings.
    """
    size = codec.num_bytes(layout)
    messages = pool.take(layout.num_shards * size, torch.uint8)
    parts = messages.view(layout.num_shards, size)

    def start() -> Waitable:
        codec.encode(layout, rank, shard, parts[rank])
        work: Waitable = gather(messages, parts[rank])
        return work

    work = start_beside(messages.device, start)

    def decode() -> None:
        for k, (message, part) in enumerate(
            zip(parts, full.view(layout.num_shards, -1), strict=True)
        ):
            codec.decode(layout, k, message, part)
        pool.give(messages)

    return ThenCopy(work, decode)
