"""What a simulated step is made of: units and groups with their sizes and times, and settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vescale_fsdp.program import ZERO_TABLE, Row
from vescale_fsdp_tune.costs.machine import Backend
from vescale_fsdp_tune.costs.model import Dtype

SHARDS, REPLICAS, HOST = "shards", "replicas", "host"  # networks


@dataclass(frozen=True)
class GroupSeconds:
    """The time of one group.

    Attributes:
        latency_s, gather_s, reduce_s: of a collective among the ranks that shard: for each, and
            what its bytes take.
        wide_reduce_s: as ``reduce_s``, of sums of several micro-batches.
        collective_s, gather_cpu_s, reduce_cpu_s: the same, of the processor.
        cast_s: copying the own shard to where it is sent from; with streams in ``gather_s``.
        decode_s: after an all-gather in 8 bits.
        copy_s: of its gradients to the buffer that is sent.
        sum_s: after a reduction.
        replica_s, replica_gather_s: over the replicas, latency included.
        replica_cpu_s: of the processor, for the sum over the replicas.
        host_s: of gradients to the host's memory.
    """

    latency_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    wide_reduce_s: float = 0.0
    collective_s: float = 0.0
    gather_cpu_s: float = 0.0
    reduce_cpu_s: float = 0.0
    cast_s: float = 0.0
    decode_s: float = 0.0
    copy_s: float = 0.0
    sum_s: float = 0.0
    replica_s: float = 0.0
    replica_gather_s: float = 0.0
    replica_cpu_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True)
class GroupCosts:
    """Sizes, dtypes and times of one group on one rank."""

    shard_elements: int  # of what a rank has between steps
    num_shards: int  # ranks of an all-gather
    tensors: tuple[int, ...]  # elements of each tensor, in the order of definition
    shard_dtype: Dtype
    compute_dtype: Dtype
    reduce_dtype: Dtype
    trainable: bool
    gather_message: int | None = None  # bytes that a rank sends in 8 bits; None: not encoded
    reduce_message: int | None = None  # the same for gradients, to each rank
    num_outer: int = 1  # replicas that optimizer states are sharded over too
    seconds: GroupSeconds = GroupSeconds()

    @property
    def inner_elements(self) -> int:
        """Elements that a rank contributes to an all-gather."""
        return self.shard_elements * self.num_outer

    @property
    def gathered_message(self) -> int:
        """Bytes that a rank contributes to an all-gather."""
        if self.gather_message is not None:
            return self.gather_message
        return self.inner_elements * self.compute_dtype.itemsize

    @property
    def copied_dtype(self) -> Dtype:
        """The dtype in which a backward's gradients are copied and sent on the CPU."""
        is_narrower = self.reduce_dtype.itemsize < self.compute_dtype.itemsize
        return self.reduce_dtype if is_narrower else self.compute_dtype

    @property
    def elements(self) -> int:
        """Elements of its tensors, without padding."""
        return sum(self.tensors)

    @property
    def full_elements(self) -> int:
        """Elements of the unsharded parameters, with padding."""
        return self.inner_elements * self.num_shards

    @property
    def full_bytes(self) -> int:
        """Bytes of the unsharded parameters."""
        return self.full_elements * self.compute_dtype.itemsize

    @property
    def is_one(self) -> bool:
        """Whether the shard is the unsharded parameters, so that these need no memory."""
        is_plain = self.gather_message is None and self.num_outer == 1
        return self.num_shards == 1 and is_plain and self.compute_dtype == self.shard_dtype

    @property
    def shard_bytes(self) -> int:
        """Bytes of the shard, and also of its gradient."""
        return self.shard_elements * self.shard_dtype.itemsize


@dataclass(frozen=True)
class UnitCosts:
    """One unit at its position in forward order.

    Attributes:
        keeps: it stays unsharded from forward to backward.
        forward_s, backward_s, recompute_s: of compute.
        engine_s: of the engine, in a forward and in a backward; with streams, what it is longer
            than compute.
    """

    title: str
    groups: tuple[GroupCosts, ...]
    is_root: bool
    keeps: bool
    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    engine_s: tuple[float, float] = (0.0, 0.0)

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return any(group.trainable for group in self.groups)

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each of its tensors."""
        return [size for group in self.groups for size in group.tensors]

    @cached_property
    def trained(self) -> int:
        """Elements of the tensors that require a gradient."""
        return sum(sum(group.tensors) for group in self.groups if group.trainable)

    @cached_property
    def later_half(self) -> int:
        """Elements of the trained tensors whose gradients are taken first (`gather.Trained`)."""
        sizes = [size for group in self.groups if group.trainable for size in group.tensors]
        so_far = later = 0
        for size in sizes:
            later += size if 2 * so_far >= self.trained else 0
            so_far += size
        return later

    @cached_property
    def gradients(self) -> list[tuple[int, int]]:
        """Index of a group, and number of elements, in the order of gradients.

        Those of a group that come next to each other are one, but for the one at the end of the
        later half: between them nothing happens.
        """
        found, seen = [(0, 0)], 0
        for place, group in reversed([*enumerate(self.groups)]):
            for elements in reversed(group.tensors) if group.trainable else ():
                if found[-1][0] != place or seen == self.later_half:
                    found.append((place, elements))
                else:
                    found[-1] = (place, found[-1][1] + elements)
                seen += elements
        return [each for each in found if each[1]]


@dataclass(frozen=True)
class How:
    """The settings of the engine that a step depends on.

    Attributes:
        backend: "gloo" reduces by all-to-all, "nccl" by reduce-scatter.
        row: of the table of ZeRO's stages.
        num_replicas: of HSDP, or of "ddp". Reduced gradients are summed over them.
        in_flight: as in ``fully_shard``.
        micro_batches: of a step. Two at most are simulated that do not synchronize.
        offload: shards, gradients and states are in the host's memory.
        num_outer: replicas that optimizer states are sharded over too.
        replica_network: that of the shards, if both leave a node.
        small_bytes: without streams, neighbours of at most so much for each rank share messages.
    """

    backend: Backend
    row: Row = ZERO_TABLE["zero3"]
    num_replicas: int = 1
    in_flight: int = 2
    micro_batches: int = 1
    offload: bool = False
    small_bytes: int = 0
    num_outer: int = 1
    replica_network: str = REPLICAS
