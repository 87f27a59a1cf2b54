"""Batch: the gathers of a unit, or its reductions, in one operation of the communicator.

Most units are one buffer, and so one collective each way. Parameters that cannot lie in a flat
buffer have collectives of their own: those with ``Shard(d)``, and those that gather themselves
(each layer of torchao's float8, for example). Each writes in place what it gathers. NCCL carries
out several as one operation, with one launch (``ncclGroupStart``), so nothing has to be copied into
one message and out of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp import compat, devices
from vescale_fsdp.devices import Waitable


class Batch:
    """Collectives that are issued together.

    Cost: at `issue` one operation for all gathers, and one for all reductions of a kind.
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
        """Start all, after what the current and the copy stream have queued so far."""
        if self._gathers:
            fulls, owns = map(list, zip(*self._gathers, strict=True))
            self._work[None] = devices.start_beside(
                device, lambda: compat.all_gather_many(fulls, owns, gather_group)
            )
        for op, pairs in self._reductions.items():
            shards, sources = map(list, zip(*pairs, strict=True))
            self._work[op] = compat.reduce_scatter_many(shards, sources, op, reduce_group)
        self._gathers.clear()
        self._reductions.clear()

    def work(self, op: Any) -> Waitable | None:
        """What to wait for, of a kind."""
        return self._work[op]

    def wait(self, op: Any) -> None:
        """Let the current stream wait for the collectives of a kind."""
        work = self._work[op]
        if work is not None:
            work.wait()


class _Part:
    """One of the collectives."""

    def __init__(self, batch: Batch, op: Any) -> None:
        self._batch, self._op = batch, op

    def is_completed(self) -> bool:
        work = self._batch.work(self._op)
        return getattr(work, "is_completed", lambda: True)()

    def wait(self) -> None:
        self._batch.wait(self._op)
