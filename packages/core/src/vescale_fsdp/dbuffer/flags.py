"""Flags: bytes that are set where any rank has set them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from vescale_fsdp import compat, devices, waiting
from vescale_fsdp.backends import backend_name
from vescale_fsdp.dbuffer.collectives import Comm
from vescale_fsdp.dbuffer.exchange import Exchange
from vescale_fsdp.devices import Waitable

_MOST_PEERS = 8  # that each rank writes to itself; beyond, a collective needs fewer messages


class Flags:
    """The largest of each byte over all ranks that reduce together, on its way.

    Args:
        values: of this rank: uint8, flat; the same number on every rank.
        comm: of the ranks. Ranks start their flags and reductions in one order.

    Cost: among few ranks on gloo one message of these bytes to each other rank, else one
    all-reduce; with replicas another over them, in `finish`.
    """

    def __init__(self, values: torch.Tensor, comm: Comm) -> None:
        self._values, self._comm = values, comm
        self._parts: list[torch.Tensor] = []  # of the other ranks
        self._work: Waitable | None = None
        group = comm.reduce_group
        if comm.size == 1:
            return
        comm.issued.count("reductions", values.numel())
        is_gloo = not devices.has_streams(values.device) and backend_name(group, "cpu") == "gloo"
        if is_gloo and comm.size <= _MOST_PEERS:
            received = list(values.new_empty(comm.size, values.numel()).unbind())
            self._work = Exchange([values] * comm.size, received, comm.rank, group)
            self._parts = [part for rank, part in enumerate(received) if rank != comm.rank]
        else:
            self._work = compat.all_reduce(values, group, dist.ReduceOp.MAX)

    def finish(self) -> torch.Tensor:
        """Wait for the other ranks (on CUDA the current stream does). Call it once."""
        if self._work is not None:
            waiting.wait(self._work, "the flags of used parameters")
        for part in self._parts:
            torch.maximum(self._values, part, out=self._values)
        if self._comm.replica_group is not None:
            return Flags(self._values, self._comm.among_replicas).finish()
        return self._values
