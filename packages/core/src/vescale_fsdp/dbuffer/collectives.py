"""The collectives of a DBuffer: an even all-gather of parameters, an even reduction of gradients.

Every collective here is asynchronous, on CUDA and on CPU. The caller keeps a handle and waits for
it when the data is needed. Before that, the buffers must not be resized or reused.

There are two ways to reduce, with the same results:

* ``native``: one reduce-scatter, in the reduce dtype, as FSDP2 does.
* ``all_to_all``: each rank sends every other rank its part, then sums what it received in rank
  order. gloo's reduce-scatter is an all-reduce internally and sends 2 (with 2 ranks) to 6 (with 4)
  times the buffer; this sends (m-1)/m of it. Messages have the dtype of the gradients (bf16) and
  are summed in the reduce dtype (fp32). If the sum is wider, a cast before or after sending
  gives the same; to a narrower one gradients are cast before.

``VESCALE_FSDP_REDUCE=auto|native|all_to_all`` chooses; ``auto`` is all_to_all on gloo. There
gathers and all-to-alls of 8 KiB a part or more are sends and receives of their own (`Exchange`),
but not with ``native``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from vescale_fsdp import devices, transfers
from vescale_fsdp.backends import backend_name
from vescale_fsdp.dbuffer.buffer import DBuffer
from vescale_fsdp.dbuffer.codec import (
    Codec,
    EncodedShard,
    decoded_sum,
    encode_parts,
    start_encoded_gather,
)
from vescale_fsdp.dbuffer.memory import SlabPool, mapped_empty
from vescale_fsdp.dbuffer.transport import (
    Batch,
    Exchange,
    Issued,
    PendingReduce,
    is_worthwhile,
    memory_for,
    start_custom_gather,
    start_custom_reduce,
)
from vescale_fsdp.devices import Waitable
from vescale_fsdp.planner import ShardLayout
from vescale_fsdp.ranks import collectives

Reduction = Literal["native", "all_to_all"]


@dataclass
class Comm:
    """The communicators of the axis that shards, and of the one that replicates.

    All-gathers and reductions have separate ones. gloo uses two threads for a group and NCCL one
    stream, so with a common one each would wait for the other.
    """

    gather_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    rank: int
    size: int
    reduction: Reduction
    replica_group: dist.ProcessGroup | None = None
    num_replicas: int = 1
    replica: int = 0  # of this rank among them
    issued: Issued = field(default_factory=Issued)
    issued_outside: Issued = field(default_factory=Issued)  # over the replicas
    connected: set[object] = field(default_factory=set)  # what was sent before the first pass
    _batch: Batch | None = None  # of what is issued within `together`

    @contextmanager
    def together(self, device: torch.device) -> Iterator[None]:
        """A context that joins the all-gathers of several buffers, and also their reductions.

        They start at its end, so do not wait for them within it. On a CPU each starts at once.
        """
        if self._batch is not None or not devices.has_streams(device):
            yield
            return
        self._batch = batch = Batch()
        try:
            yield
        finally:
            self._batch = None
        batch.issue(self.gather_group, self.reduce_group, device)

    @property
    def reducing_groups(self) -> list[dist.ProcessGroup]:
        """The process groups that gradients are summed over, one after the other."""
        return [self.reduce_group, *([self.replica_group] if self.replica_group else [])]

    @property
    def among_replicas(self) -> Comm:
        """Return communicators to gather and reduce over the axis that replicates."""
        assert self.replica_group is not None, "only asked where there are replicas"
        group = self.replica_group
        outside = self.issued_outside
        return Comm(group, group, self.replica, self.num_replicas, self.reduction, issued=outside)

    @property
    def sends_sums(self) -> bool:
        """Whether gradients are sent in the dtype of their sum. Then they are cast when copied."""
        return self.reduction == "native"

    def all_gather(self, full: torch.Tensor, own: torch.Tensor) -> Waitable:
        """All-gather the equal parts of all ranks into ``full``. ``own`` is this rank's part.

        Args:
            full: flat. ``own`` may be a view of it.

        Cost: one all-gather, in place; one copy of ``own`` if it is not a view of ``full``.
        """
        group = self.gather_group
        self.issued.count("gathers", full.numel())
        if self._batch is not None:
            return self._batch.gather(full, own)
        if self.reduction == "native" or not is_worthwhile(own, group):
            return collectives.all_gather_single(full, own, group)
        parts = full.view(self.size, -1).unbind()
        exchange = Exchange([own] * self.size, parts, self.rank, group)
        if own.data_ptr() != parts[self.rank].data_ptr():
            parts[self.rank].copy_(own)
        return exchange

    def start_gather(
        self,
        buffer: DBuffer,
        custom: Any = None,
        codec: Codec | None = None,
        pool: SlabPool | None = None,
        inner: torch.Tensor | None = None,
        encoded_shard: EncodedShard | None = None,
        first: Callable[[], object] | None = None,
    ) -> Waitable | None:
        """Fill the full face from all shards. Returns what to wait for (None: it is done).

        Args:
            custom: a gather that the user supplies (see `transport`).
            codec: writes what travels (see `codec`).
            pool: lends the memory of its messages.
            inner: this rank's part in the full face's dtype, where it is more than the shard;
                with a codec, the messages of that part.
            encoded_shard: may have this rank's message, or keeps it.
            first: called before ``inner`` is read, on the stream that reads it: waits for it.

        Cost: one all-gather of ``total_size`` elements in the full face's dtype, written in
        place. One copy of the own shard where the faces differ in dtype or device, otherwise none.
        """
        whole = buffer.full
        full = whole.flat
        own = buffer.shard if inner is None else inner
        if codec is not None and full.numel():
            assert pool is not None, "messages need memory"
            encoded_shard = encoded_shard or EncodedShard()
            return start_encoded_gather(
                codec, buffer, own, self.rank, pool, self.all_gather, encoded_shard, inner, first
            )
        whole.materialize(None if custom is None else memory_for(custom, full.device))
        if full.numel() == 0 or buffer.is_one:
            return None
        if self.size == 1:

            def copy() -> None:
                if first is not None:
                    first()
                transfers.copy_async(full, own)

            return devices.start_beside(full.device, copy)
        if custom is not None:
            self.issued.count("gathers", full.numel())
            return start_custom_gather(
                custom,
                full,
                own,
                self.rank,
                self.gather_group,
                in_place=collectives.uses_symmetric_memory(custom),
                first=first,
            )
        if first is None and own.dtype == full.dtype and devices.is_same(own, full):
            return self.all_gather(full, own)

        def start() -> Waitable:
            if first is not None:  # it is in the dtype of the full face already
                first()
                return self.all_gather(full, own)
            transfers.copy_async(buffer.own_slice(), own)
            return self.all_gather(full, buffer.own_slice())

        return devices.start_beside(full.device, start)

    def start_gather_of_messages(
        self, messages: torch.Tensor, custom: Any = None
    ) -> Waitable | None:
        """Fill ``messages`` (uint8, [ranks, bytes]), of which this rank has written its own row.

        Cost: one all-gather, in place.
        """
        if self.size == 1 or messages.numel() == 0:
            return None
        full, own = messages.view(-1), messages[self.rank]
        if custom is not None:
            self.issued.count("gathers", full.numel())
            return start_custom_gather(custom, full, own, self.rank, self.gather_group)
        return self.all_gather(full, own)

    def start_gather_of_parts(self, buffer: DBuffer, part: torch.Tensor) -> Waitable | None:
        """Fill the full face from the equal parts that neighbouring ranks have kept.

        Cost: as `start_gather`, among as many ranks as there are parts.
        """
        full = buffer.full.flat
        buffer.full.materialize()
        num_parts = full.numel() // max(part.numel(), 1)
        if full.numel() == 0:
            return None
        if num_parts == 1:
            full.copy_(part)
            return None
        return self.neighbours(num_parts).all_gather(full, part)

    def neighbours(self, num_parts: int) -> Comm:
        """Return communicators of so many neighbouring ranks. Collective at the first call."""
        ranks = dist.get_process_group_ranks(self.gather_group)
        first = self.rank // num_parts * num_parts
        return replace(
            self,
            gather_group=collectives.group_over(
                ranks[first : first + num_parts], self.gather_group
            ),
            rank=self.rank - first,
            size=num_parts,
            issued=Issued(),
            _batch=None,  # that of another communicator
        )

    def start_reduce(
        self,
        full: torch.Tensor,
        reduce_dtype: torch.dtype,
        pool: SlabPool,
        divisor: float | None = None,
        *,
        only_sums: bool = False,
        custom: Any = None,
        copies: bool = True,
    ) -> PendingReduce:
        """Start summing the full gradient buffers of all ranks into one shard each.

        Args:
            full: this rank's gradients, flat, ``size * shard_size`` elements, gaps zero. It is
                read until `PendingReduce.finish` and must not be touched before.
            reduce_dtype: in which the sum is made, and the result.
            pool: lends the memory that the collective needs until `PendingReduce.finish`.
            divisor: of the sum. Default: the number of ranks, for the average.
            only_sums: do not let the collective average, where it could.
            custom: a reduce-scatter that the user supplies (see `transport`).
            copies: on one rank the result is a copy of ``full``, whose memory a pool lends; else it
                is ``full``.

        Cost: native, ``size - 1`` times the shard in ``reduce_dtype`` on the wire (gloo: much
        more); all_to_all, the same in the dtype of ``full``, and a receive buffer of its size (less
        this rank's part, in an `Exchange`).
        """
        if self.size == 1 or full.numel() == 0:
            # Where there are streams the pool leaves what it lent to those who keep it.
            copies &= not devices.has_streams(full.device)
            done = full.to(reduce_dtype, copy=copies)
            return PendingReduce(reduce_dtype, done=done, divisor=divisor or 1.0)
        self.issued.count("reductions", full.numel())
        pending = PendingReduce(reduce_dtype, self.size, pool, divisor=divisor or self.size)
        is_nccl = backend_name(self.reduce_group, full.device) == "nccl"
        pending.is_average = (
            is_nccl  # gloo has no average
            and pending.divisor == self.size
            and not only_sums
            and reduce_dtype != torch.float16
        )
        op = dist.ReduceOp.AVG if pending.is_average else dist.ReduceOp.SUM
        if custom is not None:
            pending.done, pending.work = start_custom_reduce(
                custom, full, reduce_dtype, self.size, op, self.reduce_group
            )
            return pending
        if self.reduction == "all_to_all":
            pending.is_average = False
            self._start_all_to_all(pending, full)
            return pending
        sent = full
        if reduce_dtype == torch.float16 and not pending.is_average:
            # Half of the division before the sum, or the sum may be too large for the dtype.
            before = 2.0 ** math.ceil(math.log2(max(pending.divisor, 1.0)) / 2)
            pending.divisor /= before
            sent = torch.mul(full, 1 / before, out=pending.borrow(full.numel(), reduce_dtype))
        elif full.dtype != reduce_dtype:
            sent = pending.borrow(full.numel(), reduce_dtype).copy_(full)
        pending.done = mapped_empty(full.numel() // self.size, reduce_dtype, full.device)
        if self._batch is not None:
            pending.work = self._batch.reduce(pending.done, sent, op)
        else:
            pending.work = collectives.reduce_scatter_single(
                pending.done, sent, op, self.reduce_group
            )
        return pending

    def start_encoded_reduce(
        self,
        codec: Codec,
        layout: ShardLayout,
        full: torch.Tensor,
        reduce_dtype: torch.dtype,
        pool: SlabPool,
        divisor: float | None = None,
        errors: torch.Tensor | None = None,
    ) -> PendingReduce:
        """Start a reduction as `start_reduce`, with messages that ``codec`` encodes.

        This rank's own part is encoded too, so that all ranks' gradients are treated alike.
        ``full`` may be reused when this returns.

        Args:
            errors: rounding errors of earlier messages, to be added (see `encode_parts`).

        Cost: one all-to-all of ``layout.num_shards * codec.num_bytes(layout)`` bytes, and twice the
        memory.
        """
        self.issued.count("reductions", full.numel())
        pending = PendingReduce(reduce_dtype, self.size, pool, divisor=divisor or self.size)
        size = codec.num_bytes(layout)
        messages = pending.borrow(layout.num_shards * size, torch.uint8)
        encode_parts(codec, layout, full, messages.view(layout.num_shards, size), pool, errors)
        self._start_all_to_all(pending, messages)
        pending.sum_parts = lambda parts: decoded_sum(codec, layout, self.rank, list(parts), pool)
        return pending

    def _start_all_to_all(self, pending: PendingReduce, full: torch.Tensor) -> None:
        sent = full.view(self.size, -1).unbind()
        if not is_worthwhile(sent[0], self.reduce_group):
            parts = pending.borrow(full.numel(), full.dtype)
            pending.parts = parts.view(self.size, -1).unbind()
            pending.work = collectives.all_to_all_single(parts, full, self.reduce_group)
            return
        others = pending.borrow(full.numel() - sent[0].numel(), full.dtype)
        received = list(others.view(self.size - 1, -1).unbind())
        received.insert(self.rank, sent[self.rank])  # stays where it is
        pending.parts = received
        pending.work = Exchange(sent, received, self.rank, self.reduce_group)

    def start_replica_sum(
        self, shard: torch.Tensor, pool: SlabPool, *, averages: bool, cuts: bool
    ) -> PendingReduce:
        """Start summing a reduced shard over the replicas.

        Args:
            shard: flat; the sum may be made in place.
            pool: lends memory until `PendingReduce.finish`.
            averages: divide the sum by the number of replicas.
            cuts: leave each replica with its part of the sum.

        Cost: one all-reduce of the shard, or one reduction as `start_reduce`.
        """
        assert self.replica_group is not None, "only called where there are replicas"
        divisor = float(self.num_replicas) if averages else 1.0
        if cuts:
            outer = self.among_replicas
            return outer.start_reduce(shard, shard.dtype, pool, divisor, only_sums=True)
        self.issued_outside.count("reductions", shard.numel())
        work = collectives.all_reduce(shard, self.replica_group)
        return PendingReduce(shard.dtype, done=shard, work=work, divisor=divisor)


def choose_reduction(backend: str) -> Reduction:
    """Return the way to reduce on a backend, from ``VESCALE_FSDP_REDUCE`` (default ``auto``)."""
    choice = os.environ.get("VESCALE_FSDP_REDUCE", "auto")
    if choice == "auto":
        return "all_to_all" if backend == "gloo" else "native"
    if choice == "native" or choice == "all_to_all":
        return choice  # type: ignore[return-value]
    raise ValueError(f"VESCALE_FSDP_REDUCE must be auto, native or all_to_all, got {choice!r}")
