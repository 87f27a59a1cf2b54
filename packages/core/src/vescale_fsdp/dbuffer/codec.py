"""Codecs: they encode shards to messages for an all-gather, and decode these.

::

    shard (rank k)  --encode-->  message k  --one even all-gather-->  all messages
    all messages    --decode, one per rank-->  the slices of the full buffer

All messages have the same size, so the all-gather is one even collective. Without a codec a shard
is cast to the dtype of the full buffer and sent in place. `Cast` does the same as a codec, for
tests and as an example. `BlockCodec` has 8-bit codes.

Gradients may be encoded too, one message for each rank with its part. The receiver decodes all of
them and sums in float32::

    part k of the full buffer  --encode-->  message for rank k  --all-to-all-->  decode, add
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from vescale_fsdp import devices
from vescale_fsdp.dbuffer.buffer import DBuffer
from vescale_fsdp.dbuffer.memory import SlabPool, mapped_empty
from vescale_fsdp.dbuffer.transport import ThenCopy
from vescale_fsdp.devices import Waitable
from vescale_fsdp.planner import ShardLayout


class Codec(Protocol):
    """Encodes a shard as bytes, and decodes these into a slice of the full buffer.

    The message may depend only on the shard and on the layout, because all ranks must decode the
    same numbers from it.
    """

    def num_bytes(self, layout: ShardLayout) -> int:
        """Return the size of a message, the same for every rank. NCCL is faster with multiples of
        16.
        """

    def encode(
        self, layout: ShardLayout, rank: int, shard: torch.Tensor, message: torch.Tensor
    ) -> None:
        """Encode ``shard`` (flat, ``layout.shard_size`` elements) to ``message`` (flat, uint8)."""

    def decode(
        self, layout: ShardLayout, rank: int, message: torch.Tensor, part: torch.Tensor
    ) -> None:
        """Decode the message of ``rank`` into its ``part`` of the full buffer (flat)."""


@runtime_checkable
class AtOnce(Codec, Protocol):
    """A codec that can handle many messages at once, with the same results as one by one."""

    def is_at_once(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether it can do so on ``device`` with numbers of ``dtype``."""

    def encode_all(self, full: torch.Tensor, messages: torch.Tensor) -> None:
        """Write the message of each part of ``full``."""

    def decode_all(
        self, messages: torch.Tensor, own: torch.Tensor, first: int, full: torch.Tensor
    ) -> None:
        """Read the messages of all ranks into ``full``; of those from ``first`` on, ``own``."""

    def subtract_all(self, messages: torch.Tensor, errors: torch.Tensor) -> None:
        """Subtract what the messages of all ranks say from ``errors``; inf and NaN become 0."""

    def add_all(self, rank: int, messages: Sequence[torch.Tensor], total: torch.Tensor) -> bool:
        """Write to ``total`` what all senders have sent to ``rank``; whether it was possible."""


def _at_once(codec: Codec, device: torch.device, *dtypes: torch.dtype) -> AtOnce | None:
    if isinstance(codec, AtOnce) and all(codec.is_at_once(device, each) for each in dtypes):
        return codec
    return None


class EncodedShard:
    """Keeps this rank's message, to send it again as long as the parameters do not change.

    Memory: one message, until `drop`.
    """

    def __init__(self) -> None:
        self._message: torch.Tensor | None = None
        self._version: object = None

    def prepare(self, version: object, *, may_repeat: bool) -> None:
        """Set the ``version`` of the parameters, and whether its message may be reused."""
        if not (may_repeat and version == self._version):
            self.drop()
        self._version = version

    def message(self, num_bytes: int, device: torch.device) -> tuple[torch.Tensor, bool]:
        """Return the message, and whether it is already encoded."""
        is_written = self._message is not None and self._message.device == device
        if not is_written:
            self._message = mapped_empty(num_bytes, torch.uint8, device)
        assert self._message is not None, "there is one now"
        return self._message, is_written

    def held(self) -> list[torch.Tensor]:
        """The message, if there is one."""
        return [] if self._message is None else [self._message]

    def drop(self) -> None:
        """Drop the message, because parameters may have changed, or it is not sent again."""
        self._message = self._version = None


def start_encoded_gather(
    codec: Codec,
    buffer: DBuffer,
    shard: torch.Tensor,
    rank: int,
    pool: SlabPool,
    gather: Callable[[torch.Tensor, torch.Tensor], Any],
    encoded_shard: EncodedShard,
    written: torch.Tensor | None = None,
    first: Callable[[], object] | None = None,
) -> ThenCopy:
    """Start to fill the full face from the messages of all ranks, which ``gather`` gathers.

    The face has no memory before they have arrived.

    Args:
        rank: of the caller among those that gather.
        written: its messages, where they are there already: of as many consecutive parts of the
            layout as each rank brings. None: it brings one, that of ``shard``.
        first: called before they are read, on the stream that reads them.

    Cost: one all-gather of ``num_shards * codec.num_bytes(layout)`` bytes, memory for them until it
    is waited for, one encoding (none if ``encoded_shard`` has the message) and ``num_shards``
    decodings; or one of all messages, where the codec can.
    """
    layout = buffer.layout
    size = codec.num_bytes(layout)
    messages = pool.take(layout.num_shards * size, torch.uint8)
    # The compute stream allocates what is needed for that, as it does all else.
    at_once = _at_once(codec, messages.device, buffer.full.flat.dtype)
    own, is_written = (
        encoded_shard.message(size, messages.device) if written is None else (written, True)
    )

    def start() -> Waitable:
        if first is not None:
            first()
        if not is_written:
            codec.encode(layout, rank, shard, own)
        work: Waitable = gather(messages, own)
        return work

    work = devices.start_beside(messages.device, start)

    def decode() -> None:
        arrived = messages.view(layout.num_shards, size)
        buffer.full.materialize()
        mine = own.view(-1, size)
        first = rank * len(mine)
        if at_once is not None:
            at_once.decode_all(messages, own, first, buffer.full.flat)
            pool.give(messages)
            return
        for k, part in enumerate(buffer.full.flat.view(layout.num_shards, -1)):
            is_mine = first <= k < first + len(mine)
            codec.decode(layout, k, mine[k - first] if is_mine else arrived[k], part)
        pool.give(messages)

    return ThenCopy(work, decode)


def encode_parts(
    codec: Codec,
    layout: ShardLayout,
    full: torch.Tensor,
    messages: torch.Tensor,
    pool: SlabPool,
    errors: torch.Tensor | None,
) -> None:
    """Write one message for each part of the layout, of its elements of ``full``.

    Args:
        full: flat, ``layout.total_size`` elements.
        messages: uint8, [parts, bytes].
        pool: lends memory for a part.
        errors: what messages have lost so far, float32 and as long as ``full``. It is added
            before the encoding, and is afterwards what the new messages lose. That of blocks with
            infinity or NaN is forgotten.
    """
    at_once = _at_once(codec, full.device, full.dtype, torch.float32)
    if at_once is not None:
        if errors is None:
            at_once.encode_all(full, messages)
        else:
            at_once.encode_all(errors.add_(full), messages)
            at_once.subtract_all(messages, errors)
        return
    parts = full.view(layout.num_shards, -1)
    if errors is None:
        for rank, (part, message) in enumerate(zip(parts, messages, strict=True)):
            codec.encode(layout, rank, part, message)
        return
    arrives = pool.take(layout.shard_size, torch.float32)
    lost = errors.view(layout.num_shards, -1)
    for rank, (part, error, message) in enumerate(zip(parts, lost, messages, strict=True)):
        error.add_(part)
        codec.encode(layout, rank, error, message)
        codec.decode(layout, rank, message, arrives)
        error.sub_(arrives).nan_to_num_(0.0, 0.0, 0.0)
    pool.give(arrives)


def decoded_sum(
    codec: Codec, layout: ShardLayout, rank: int, messages: list[torch.Tensor], pool: SlabPool
) -> torch.Tensor:
    """Return the sum of the messages of all ranks to ``rank``, in float32 and rank order.

    Args:
        messages: from each rank, those of as many consecutive parts of the layout as ``rank`` has.
    """
    first, *others = messages
    num_parts = layout.num_shards // len(messages)
    numel = num_parts * layout.shard_size

    def decode(sent: torch.Tensor, into: torch.Tensor) -> None:
        pairs = zip(sent.view(num_parts, -1), into.view(num_parts, -1), strict=True)
        for k, (message, part) in enumerate(pairs):
            codec.decode(layout, rank * num_parts + k, message, part)

    total = mapped_empty(numel, torch.float32, first.device)
    at_once = _at_once(codec, first.device, torch.float32)
    if at_once is not None and at_once.add_all(rank, messages, total):
        return total
    decode(first, total)
    scratch = pool.take(numel, torch.float32)
    for sent in others:
        decode(sent, scratch)
        total.add_(scratch)
    pool.give(scratch)
    return total
