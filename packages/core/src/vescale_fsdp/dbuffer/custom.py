"""Collectives that the user supplies, in the form of FSDP2's ``AllGather`` and ``ReduceScatter``.

They allocate what they send and receive themselves (a pool of their own, for example). The
parameters lie elsewhere, under addresses that stay; so one copy goes in, and one comes out. With
FSDP2's gather through symmetric memory the parameters themselves lie in that, and nothing is
copied out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp import compat, devices, waiting
from vescale_fsdp.devices import Waitable


class ThenCopy:
    """A collective under way, and what is left to do when it has ended. Waits like a ``Work``."""

    def __init__(self, work: Any, finish: Callable[[], object]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        """Wait, and copy what has arrived to its place."""
        if self._work is not None:
            self._work.wait()
        self._finish()


def memory_for(gather: Any, device: torch.device) -> AbstractContextManager[None]:
    """A context in which to allocate the full buffer, so that ``gather`` may write to it."""
    symmetric = compat.uses_symmetric_memory(gather)
    return compat.symmetric_memory(device) if symmetric else devices.private_memory(device)


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
    """Fill ``full`` from the shards of all ranks, of which this one's is ``own``.

    Args:
        in_place: ``full`` was allocated within `memory_for`, and ``gather`` may write to it.
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
        devices.copy_async(mine, own)
        work = gather(arrived, mine, group, async_op=True)
        return waiting.bounded(work, arrived, group, "an all-gather")

    work = devices.start_beside(full.device, start)
    return work if in_place else ThenCopy(work, lambda: full.copy_(arrived))


def start_custom_reduce(
    reduce: Any, full: torch.Tensor, dtype: torch.dtype, size: int, op: Any, group: Any
) -> tuple[torch.Tensor, ThenCopy]:
    """Sum ``full`` over the ranks; returns this rank's shard and what to wait for."""
    sent = reduce.allocate((full.numel(),), dtype=dtype, device=full.device)
    sent.copy_(full)
    shard = reduce.allocate((full.numel() // size,), dtype=dtype, device=full.device)
    work = reduce(shard, sent, group, op, async_op=True)
    work = waiting.bounded(work, shard, group, "a reduce-scatter")
    return shard, ThenCopy(work, lambda: sent)
