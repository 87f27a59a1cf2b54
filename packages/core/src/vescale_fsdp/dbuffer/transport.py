"""Collectives that are not one call of ``torch.distributed``, and running reductions.

`Exchange`, for gloo: an all-gather or all-to-all as separate sends and receives. In gloo's own
collectives, a rank's data precedes its message that it is ready to receive, in one stream. So its
peer starts to send only after it has received, and data flows in one direction at a time. Here all
receives are posted first. On a link of 1 Gbit/s this reaches 950 Mbit/s in each direction instead
of 520 to 630, for half of the processor time (docs/design/performance.md).

`Batch`, for streams: all all-gathers of a unit, or all its reductions, in one operation of the
communicator. Most units have one buffer, and so one collective in each direction. Some parameters
cannot be in a flat buffer and have their own collectives: those with ``Shard(d)``, and those with
FSDP2's extension hooks (for example each layer of torchao's float8). NCCL runs several collectives
as one operation with one launch (``ncclGroupStart``), so nothing is copied into one message.

Custom collectives of the user, in the form of FSDP2's ``AllGather`` and ``ReduceScatter``. They
allocate their own memory, but parameters must stay at their addresses. So there is one copy before
and one after the collective. With FSDP2's all-gather through symmetric memory the parameters are in
that memory, and there is no copy after it. As in FSDP2 they are called with ``async_op=False``: the
user's code may work on the result before it returns. On streams it runs beside the compute.

`let_ranks_go_first`, for gloo: each gloo communicator has a thread that waits for the network. A
rank that sends holds a lock for some microseconds. If data arrives at this moment and all cores are
busy, the system may run the thread instead of the rank. The thread then spins on the lock until its
time slice ends: 3 to 7 ms, several times in each step. With the batch scheduling policy the thread
waits as long as the rank can run (docs/design/performance.md, 5).

`PendingReduce` is a running reduction. `Issued` counts all collectives.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from vescale_fsdp import devices, transfers
from vescale_fsdp.backends import backend_name
from vescale_fsdp.dbuffer.memory import Lasting, SlabPool, mapped_empty
from vescale_fsdp.devices import Waitable
from vescale_fsdp.ranks import collectives, waits

# Of the part for each rank. For shorter ones one call of a collective is enough.
SHORTEST_BYTES = 1 << 13
_NUM_TAGS = 1 << 22
_WHAT = "an exchange"


def is_worthwhile(part: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether an exchange is better than a collective if ``part`` is sent to each rank.

    The same on all ranks if their parts have the same size.
    """
    is_long = part.device.type == "cpu" and part.nbytes >= SHORTEST_BYTES
    return is_long and backend_name(group, "cpu") == "gloo"


class Exchange:
    """A running exchange. `wait` is like that of a ``Work``. It holds its tensors until then.

    Args:
        sent: a tensor for each rank, in the order of ranks. Do not write to them before `wait`.
        received: a tensor to fill from each rank. Do not use them before `wait`. In both lists the
            entry of this rank and empty ones are ignored.
        rank: this rank in ``group``.
        group: a process group of gloo. All of its ranks make the same exchange.

    Cost: one send and one receive for each other rank; none for empty parts. Nothing is copied.
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
            raise waits.failure(error, group, _WHAT, time.monotonic()) from error

    def _start(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], rank: int
    ) -> None:
        # A tag by the size: gloo ends the process where a message is longer than what receives it.
        size, group = len(sent), self._group
        for distance in range(1, size):
            peer = (rank - distance) % size
            part = received[peer]
            if part.nbytes:
                work = dist.irecv(part, group=group, group_src=peer, tag=part.nbytes % _NUM_TAGS)
                self._works.append(work)
        for distance in range(1, size):  # the next one first, so that not all send to the same
            peer = (rank + distance) % size
            part = sent[peer]
            if part.nbytes:
                work = dist.isend(part, group=group, group_dst=peer, tag=part.nbytes % _NUM_TAGS)
                self._works.append(work)

    def wait(self) -> None:
        """Wait until all tensors were sent and received.

        Raises:
            RankMismatchError: a rank did not take part in time, or is no longer connected.
        """
        waits.wait_for_messages(self._works, self._group, _WHAT)
        self._works, self._tensors = [], ()


class Batch:
    """Collectives that are started together.

    Cost: `issue` runs one operation for all all-gathers, and one for all reductions of a kind.
    """

    def __init__(self) -> None:
        self._gathers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._reductions: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._work: dict[Any, Waitable | None] = {}  # by the operation; None: of gathers

    def gather(self, full: torch.Tensor, own: torch.Tensor) -> Waitable:
        """Add an all-gather. ``own`` may still be written to on the copy stream."""
        self._gathers.append((full, own))
        return _Part(self, None)

    def reduce(self, shard: torch.Tensor, full: torch.Tensor, op: Any) -> Waitable:
        """Add a reduce-scatter."""
        self._reductions.setdefault(op, []).append((shard, full))
        return _Part(self, op)

    def issue(
        self,
        gather_group: dist.ProcessGroup,
        reduce_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Start all of them, after the work that the current and the copy stream have queued."""
        if self._gathers:
            fulls, owns = map(list, zip(*self._gathers, strict=True))
            self._work[None] = devices.start_beside(
                device, lambda: collectives.all_gather_many(fulls, owns, gather_group)
            )
        for op, pairs in self._reductions.items():
            shards, sources = map(list, zip(*pairs, strict=True))
            self._work[op] = collectives.reduce_scatter_many(shards, sources, op, reduce_group)
        self._gathers.clear()
        self._reductions.clear()

    def work(self, op: Any) -> Waitable | None:
        """Return a handle to wait for the collectives of a kind."""
        return self._work[op]

    def wait(self, op: Any) -> None:
        """Make the current stream wait for the collectives of a kind."""
        work = self._work[op]
        if work is not None:
            work.wait()


class _Part:
    """A handle of one of the collectives."""

    def __init__(self, batch: Batch, op: Any) -> None:
        self._batch, self._op = batch, op

    def is_completed(self) -> bool:
        work = self._batch.work(self._op)
        return getattr(work, "is_completed", lambda: True)()

    def wait(self) -> None:
        self._batch.wait(self._op)


class ThenCopy:
    """A running collective, and a function to call after it. `wait` is like that of a ``Work``."""

    def __init__(self, work: Any, finish: Callable[[], object]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        """Wait, and call the function, which copies the result."""
        if self._work is not None:
            self._work.wait()
        self._finish()


def memory_for(gather: Any, device: torch.device) -> AbstractContextManager[None]:
    """Return a context to allocate the full buffer in, so that ``gather`` can write to it."""
    symmetric = collectives.uses_symmetric_memory(gather)
    return collectives.symmetric_memory(device) if symmetric else nullcontext()


def start_custom_gather(
    gather: Any,
    full: torch.Tensor,
    own: torch.Tensor,
    rank: int,
    group: dist.ProcessGroup,
    *,
    in_place: bool = False,
    first: Callable[[], object] | None = None,
) -> Waitable | None:
    """Start the user's all-gather into ``full``. ``own`` is this rank's shard.

    Args:
        in_place: ``full`` was allocated within `memory_for`, so ``gather`` can write to it.
        first: called before ``own`` is read, on the stream that reads it.
    """
    arrived = full
    if not in_place:
        arrived = gather.allocate((full.numel(),), dtype=full.dtype, device=full.device)
    size = own.numel()
    mine = arrived.narrow(0, rank * size, size)

    def start() -> Waitable | None:
        if first is not None:
            first()
        transfers.copy_async(mine, own)
        with waits.asking:
            gather(output_tensor=arrived, input_tensor=mine, group=group, async_op=False)
        return None

    work = devices.start_beside(full.device, start)
    return work if in_place else ThenCopy(work, lambda: full.copy_(arrived))


def start_custom_reduce(
    reduce: Any, full: torch.Tensor, dtype: torch.dtype, size: int, op: Any, group: Any
) -> tuple[torch.Tensor, ThenCopy]:
    """Start the user's reduce-scatter of ``full``. Returns this rank's shard and a handle."""
    sent = reduce.allocate((full.numel(),), dtype=dtype, device=full.device)
    sent.copy_(full)
    shard = reduce.allocate((full.numel() // size,), dtype=dtype, device=full.device)

    def start() -> None:
        with waits.asking:
            reduce(output_tensor=shard, input_tensor=sent, group=group, op=op)

    work = devices.start_beside(full.device, start)
    return shard, ThenCopy(work, lambda: sent)


_THREAD_NAME = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")


def let_ranks_go_first() -> None:
    """Schedule the network threads of gloo's communicators as batch threads (``SCHED_BATCH``).

    Call it after communicators were made. Threads with another policy than the default do not
    change. It does nothing on systems without this policy.
    """
    if not hasattr(os, "SCHED_BATCH") or not _THREADS.is_dir():
        return
    for thread in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended, or the system refuses
            if (thread / "comm").read_text().strip() != _THREAD_NAME:
                continue
            number = int(thread.name)
            if os.sched_getscheduler(number) == os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))


@dataclass
class PendingReduce:
    """A running reduction. It holds its buffers until `finish`."""

    reduce_dtype: torch.dtype
    size: int = 1
    pool: SlabPool | None = None
    work: Waitable | None = None
    parts: Sequence[torch.Tensor] | None = None  # all_to_all: from each rank, still to be summed
    sum_parts: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None  # if encoded
    done: torch.Tensor | None = None  # native: the sum over ranks, or the average
    is_average: bool = False
    divisor: float = 1.0
    memory: Lasting | None = None  # of the sum of ``parts``, if it is in the reduce dtype
    _borrowed: list[torch.Tensor] = field(default_factory=list)

    def borrow(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return temporary memory, which is released in `finish`."""
        assert self.pool is not None, "a reduction over several ranks has a pool"
        self._borrowed.append(self.pool.take(num_elements, dtype))
        return self._borrowed[-1]

    def has_arrived(self, seconds: float, device: torch.device) -> bool:
        """Wait at most ``seconds``. Returns whether it has ended."""
        if self.work is None:
            return True
        if not isinstance(self.work, waits.Ending):
            self.work = waits.Ending(self.work, has_streams=devices.has_streams(device))
        return self.work.has_ended(seconds)

    def finish(self, what: str = "a reduction") -> torch.Tensor:
        """Wait, and return the sum over ranks divided by the divisor, flat, [``shard_size``].

        Call it once.

        Args:
            what: names the reduction in errors.
        """
        if self.work is not None:
            waits.wait(self.work, what)
            self.work = None
        result = self.done
        if self.parts is not None:
            # Before it is divided a sum may be too large for fp16.
            wide = torch.float32 if self.reduce_dtype == torch.float16 else self.reduce_dtype
            memory = self.memory if wide == self.reduce_dtype else None
            add_up = self.sum_parts or partial(_sum, dtype=wide, memory=memory)
            result = add_up(self.parts)
        assert result is not None, "a reduction has one of the two"
        if self.divisor != 1.0 and not self.is_average:
            result.mul_(1.0 / self.divisor)
        result = result.to(self.reduce_dtype)
        while self._borrowed and self.pool is not None:
            self.pool.give(self._borrowed.pop())
        self.parts = self.sum_parts = self.done = None
        return result


def _sum(parts: Sequence[torch.Tensor], dtype: torch.dtype, memory: Lasting | None) -> torch.Tensor:
    """Sum in ``dtype`` and in rank order, so that the result is the same in every run."""
    first, second, *others = parts
    allocate = mapped_empty if memory is None else memory.take
    result = allocate(first.numel(), dtype, first.device)
    if first.dtype == dtype:
        torch.add(first, second, out=result)
    else:
        result.copy_(first).add_(second)
    for part in others:
        result.add_(part)
    return result


class Issued:
    """The number of collectives that this rank has started on an axis, and a digest of their sizes.

    It is the same on all ranks that have started the same collectives in the same order.
    """

    def __init__(self) -> None:
        # The units of the last all-gather, hashed with its size. Not with that of a reduction: a
        # rank may issue one before or after the next all-gather.
        self.subject = 0
        self._of = {"gathers": (0, 0), "reductions": (0, 0)}

    def count(self, kind: Literal["gathers", "reductions"], num_elements: int) -> None:
        """Count a collective."""
        number, digest = self._of[kind]
        subject = self.subject if kind == "gathers" else 0
        self._of[kind] = number + 1, hash((digest, num_elements, subject))

    def as_list(self) -> list[list[int]]:
        """Return number and digest of all-gathers, then of reductions."""
        return [list(each) for each in self._of.values()]
