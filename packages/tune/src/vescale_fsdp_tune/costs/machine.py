"""The hardware of a job, as one rank sees it: network, memory, and rates. No torch.

A collective among ranks of several nodes uses the network of all of them at once: with k ranks of a
node in one ring, k network cards each carry 1 / k of what a rank sends. With k separate rings (the
replicas of HSDP, whose shards are within a node) each has one card::

    8 ranks a node, 450 GB/s inside, 50 GB/s between, for each rank
    all-gather over 64 ranks            min(450, 8 x 50) = 400 GB/s
    all-reduce of 8 replicas of 8       50 GB/s
    all-gather over the 8 of a node     450 GB/s
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True)
class Link:
    """A network as one rank sees it.

    Attributes:
        bytes_per_s: that it sends.
        latency_s: of a collective, whatever its size.
        hop_s: more latency for each rank of a collective but the first.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    hop_s: float = 0.0

    def seconds(self, num_bytes: float, num_ranks: int = 1) -> float:
        """Return the seconds of a collective in which a rank sends ``num_bytes``; 0 for none."""
        if not num_bytes:
            return 0.0
        return self.latency_s + self.hop_s * (num_ranks - 1) + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Machine:
    """The hardware of one rank, measured or published.

    Attributes:
        name: in tables.
        backend: "gloo" for CPUs. There gathers and reductions alternate, and time of the processor
            for the engine and for sending is added to that of the model.
        memory_bytes: of the device.
        ranks_per_node: that ``inside`` connects.
        inside, between: the network between ranks of a node, and of different nodes.
        copy_bytes_per_s: of copies on the device, bytes read and written.
        optimizer_elements_per_s: that the optimizer updates.
        unit_s, collective_s, parameter_s: time of the engine on the processor, for each forward or
            backward of a unit, each collective, and the gradient of each parameter.
        sending_s_per_byte: time of the processor for what a rank sends; 0 where a device sends.
        summing_s_per_byte: the same for what it sends of an all-reduce.
        flops_per_s: that blocks reach; 0 if times of blocks are measured.
        host_bytes_per_s: between the device and the host's memory, one way.
        host_elements_per_s: that an optimizer on the host updates.
        workspace_bytes: that libraries of matrix products hold on the device.
    """

    name: str
    backend: Backend
    memory_bytes: int
    ranks_per_node: int
    inside: Link
    between: Link
    copy_bytes_per_s: float
    optimizer_elements_per_s: float
    unit_s: float = 0.0
    collective_s: float = 0.0
    parameter_s: float = 0.0
    sending_s_per_byte: float = 0.0
    summing_s_per_byte: float = 0.0
    flops_per_s: float = 0.0
    host_bytes_per_s: float = 25e9
    host_elements_per_s: float = 1e9
    workspace_bytes: int = 0

    def link(self, num_ranks: int, stride: int = 1) -> Link:
        """Return the network of ``num_ranks`` ranks, each ``stride`` after the one before."""
        if num_ranks * stride <= self.ranks_per_node:
            return self.inside
        num_cards = max(self.ranks_per_node // stride, 1)
        if num_cards == 1:
            return self.between
        rate = min(self.inside.bytes_per_s, num_cards * self.between.bytes_per_s)
        return Link(rate, self.between.latency_s, self.between.hop_s)
