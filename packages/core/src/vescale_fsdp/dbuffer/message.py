"""Messages with several small buffers, or with flags.

The message of an all-gather or a reduction has a row for each rank. A row has that rank's parts of
the buffers, one after the other::

                  a      b        c
    rank 0     | a a a | b b . | c c c c |
    rank 1     | a a a | b b . | c c c c |          `.` is a gap, for the next part's alignment

So there is one collective for all buffers, which costs a copy of each. It is used on CPUs. On
streams several collectives are one operation without copies (`transport.Batch`).

`Flags` are bytes; a result is set if any rank has set it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from vescale_fsdp import devices
from vescale_fsdp.backends import backend_name
from vescale_fsdp.dbuffer.buffer import DBuffer
from vescale_fsdp.dbuffer.collectives import Comm
from vescale_fsdp.dbuffer.memory import SlabPool
from vescale_fsdp.dbuffer.transport import Exchange, PendingReduce, ThenCopy
from vescale_fsdp.devices import Waitable
from vescale_fsdp.ranks import collectives, waits

_ALIGNMENT = 16  # bytes


class GatherMessage:
    """One all-gather of the shards of several buffers.

    Args:
        buffers: their shards are sent in the dtype of the full buffers; all are on the CPU.
        comm: the communicators of the ranks.
        pool: provides the memory of the message until all parts were taken.

    Cost: one all-gather of a row for each rank, and two copies of each shard.
    """

    def __init__(self, buffers: Sequence[DBuffer], comm: Comm, pool: SlabPool) -> None:
        self._size, self._pool = comm.size, pool
        widths = [buffer.layout.shard_size * buffer.full_dtype.itemsize for buffer in buffers]
        starts = [0]
        for width in widths:
            starts.append(starts[-1] + -(-width // _ALIGNMENT) * _ALIGNMENT)
        self._taken = pool.take(comm.size * starts[-1], torch.uint8)
        rows = self._taken.view(comm.size, starts[-1])
        self._columns = [
            rows[:, start : start + width].view(buffer.full_dtype)
            for buffer, start, width in zip(buffers, starts, widths, strict=False)
        ]
        own = [column[comm.rank] for column in self._columns]
        torch._foreach_copy_(own, [buffer.shard for buffer in buffers])
        self._work = comm.start_gather_of_messages(rows)
        self._num_left = len(buffers)

    def take(self, index: int, buffer: DBuffer) -> ThenCopy:
        """Fill the full buffer of ``buffer``. Returns a handle. Call it once for each buffer."""
        buffer.full.materialize()
        return ThenCopy(self, partial(self._copy, index, buffer))

    def _copy(self, index: int, buffer: DBuffer) -> None:
        buffer.full.flat.view(self._size, -1).copy_(self._columns[index])
        self.drop()

    def drop(self) -> None:
        """Record that a part was taken or is not needed. Call it after `wait`."""
        self._num_left -= 1
        if not self._num_left:
            self._columns = []
            self._pool.give(self._taken)

    def wait(self) -> None:
        """Wait for the message."""
        if self._work is not None:
            self._work.wait()
            self._work = None


class SharedReduce:
    """A group's part of a reduction of several groups. It is used as a `PendingReduce`."""

    def __init__(self, message: _ReduceMessage, start: int, stop: int) -> None:
        self._message, self._start, self._stop = message, start, stop

    def has_arrived(self, seconds: float, device: torch.device) -> bool:
        """Wait at most ``seconds``. Returns whether it has ended."""
        return self._message.has_arrived(seconds, device)

    def finish(self, what: str = "a reduction") -> torch.Tensor:
        """Wait, and return this part of the sum. Call it once."""
        return self._message.finish(what)[self._start : self._stop]


class _ReduceMessage:
    def __init__(self, pending: PendingReduce, taken: torch.Tensor, pool: SlabPool) -> None:
        self._pending, self._taken, self._pool = pending, taken, pool
        self._sum: torch.Tensor | None = None

    def has_arrived(self, seconds: float, device: torch.device) -> bool:
        return self._sum is not None or self._pending.has_arrived(seconds, device)

    def finish(self, what: str) -> torch.Tensor:
        if self._sum is None:
            self._sum = self._pending.finish(what)
            self._pool.give(self._taken)
        return self._sum


def start_reduce_together(
    fulls: Sequence[torch.Tensor],
    comm: Comm,
    reduce_dtype: torch.dtype,
    pool: SlabPool,
    divisor: float | None,
    *,
    only_sums: bool,
) -> list[SharedReduce]:
    """Start to reduce several gradient buffers of one dtype over all ranks (`Comm.start_reduce`).

    Cost: one reduction of all of them, and a copy of each.
    """
    sizes = [full.numel() // comm.size for full in fulls]
    starts, step = [0], max(_ALIGNMENT // fulls[0].element_size(), 1)
    for size in sizes:  # with a gap, so that sums of two groups are never taken for neighbours
        starts.append(starts[-1] + (size // step + 1) * step)
    taken = pool.take(starts[-1] * comm.size, fulls[0].dtype)
    rows = taken.view(comm.size, starts[-1])
    ranges = [(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    torch._foreach_copy_(
        [rows[:, start:stop] for start, stop in ranges], [f.view(comm.size, -1) for f in fulls]
    )
    pending = comm.start_reduce(taken, reduce_dtype, pool, divisor, only_sums=only_sums)
    message = _ReduceMessage(pending, taken, pool)
    return [SharedReduce(message, start, stop) for start, stop in ranges]


_MOST_PEERS = 8  # that each rank writes to itself; beyond, a collective needs fewer messages


class Flags:
    """A running maximum of each byte over all ranks.

    Args:
        values: this rank's bytes: uint8, flat; the same number on every rank.
        comm: the communicators of the ranks. Ranks start flags and reductions in the same order.

    Cost: with few ranks on gloo one message of these bytes to each other rank, else one all-reduce;
    with replicas another over them, in `finish`.
    """

    def __init__(self, values: torch.Tensor, comm: Comm) -> None:
        self._values, self._comm = values, comm
        self._parts: list[torch.Tensor] = []  # of the other ranks
        self._work: Waitable | None = None
        self._outer: Flags | None = None
        group = comm.reduce_group
        if comm.size == 1:
            if comm.replica_group is not None:
                self._outer = Flags(values, comm.among_replicas)
            return
        comm.issued.count("reductions", values.numel())
        is_gloo = not devices.has_streams(values.device) and backend_name(group, "cpu") == "gloo"
        if is_gloo and comm.size <= _MOST_PEERS:
            received = list(values.new_empty(comm.size, values.numel()).unbind())
            self._work = Exchange([values] * comm.size, received, comm.rank, group)
            self._parts = [part for rank, part in enumerate(received) if rank != comm.rank]
        else:
            self._work = collectives.all_reduce(values, group, dist.ReduceOp.MAX)

    def finish(self) -> torch.Tensor:
        """Wait for the other ranks (on CUDA the current stream does). Call it once."""
        if self._work is not None:
            waits.wait(self._work, "the flags of used parameters")
        for part in self._parts:
            torch.maximum(self._values, part, out=self._values)
        if self._outer is not None:
            return self._outer.finish()
        if self._comm.replica_group is not None:
            return Flags(self._values, self._comm.among_replicas).finish()
        return self._values
