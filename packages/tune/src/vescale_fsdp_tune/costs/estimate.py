"""Estimates memory per rank, bytes sent and seconds of one training step, from sizes alone.

A group has S elements in its shard, is sharded over m ranks, and has R replicas of these:

* weights and gradients: S elements in the dtype of the shards; gradients of trainable groups only
* optimizer states: of the rank that has most of them; padding has none
* all-gather: each rank sends its shard to m - 1 others, (m - 1) S in the compute dtype, in forward,
  and again in backward if the unit was resharded after forward; in 8 bits m - 1 messages of codes
* reduce-scatter: (m - 1) S in the reduce dtype; on gloo in the compute dtype
  (``dbuffer/collectives``); in 8 bits m - 1 messages of codes
* with replicas: an all-reduce of the reduced shard, 2 (R - 1) / R S in the reduce dtype
* peak: see ``timeline``

Seconds are bytes divided by bandwidth, without latency and without overlap with computation.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vescale_fsdp_tune.costs.account import Peak
from vescale_fsdp_tune.costs.layouts import PlannedGroup
from vescale_fsdp_tune.costs.machine import Backend
from vescale_fsdp_tune.costs.model import Group, Model, Tensor, Unit
from vescale_fsdp_tune.costs.settings import NUM_STATES, OptimizerName, Settings
from vescale_fsdp_tune.costs.timeline import Step, run_step
from vescale_fsdp_tune.costs.units import GroupCosts, How, UnitCosts

_CODE_BLOCK = 256  # elements that share a scale in 8-bit states
_ONE_BY_ONE = ("adamw", "sgd", "none")  # optimizers of torch
_LEAST_CODED = 4096  # elements; states of smaller tensors are not encoded


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one step."""

    gather_forward_bytes: int
    gather_backward_bytes: int
    reduce_bytes: int
    replicate_bytes: int  # between the replicas of HSDP

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return (
            self.gather_forward_bytes
            + self.gather_backward_bytes
            + self.reduce_bytes
            + self.replicate_bytes
        )


@dataclass(frozen=True)
class Figures:
    """The costs of one kind of layout on one rank."""

    shard_elements: int  # of all groups
    padding_elements: int  # over all ranks of one replica
    padding_ratio: float  # over the model's elements
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    peak: Peak  # of buffers that are allocated and freed in a step
    traffic: Traffic
    communication_s: float

    @property
    def resting_bytes(self) -> int:
        """Memory between steps, without gradients."""
        return self.weights_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest memory of a step. Activations are counted if the model has a trace."""
        return self.resting_bytes + self.peak.num_bytes


def state_bytes(
    tensor: Tensor, group: Group, unit: Unit, optimizer: OptimizerName, num_elements: int
) -> int:
    """Return the bytes of optimizer states for ``num_elements`` of a tensor, without step counts.

    Per element of the tensor, adamw has two elements in the shard's dtype. adamw8bit has two codes
    of one byte, and two fp32 scales per 256 elements; for tensors below 4,096 elements it is as
    adamw. muon has one element for matrices of hidden layers (two dimensions or more, not in the
    root), two for other tensors. sgd has one (momentum). Fused ones have as many as others.
    """
    if not group.trainable or optimizer == "none":
        return 0
    if optimizer == "adamw8bit" and tensor.numel >= _LEAST_CODED:
        return 2 * num_elements + 8 * -(-num_elements // _CODE_BLOCK)
    is_muons = optimizer == "muon" and len(tensor.shape) >= 2 and not unit.is_root
    states = 1 if is_muons else NUM_STATES[optimizer]
    return states * num_elements * group.dtype.itemsize


def figures_of(model: Model, planned: Sequence[PlannedGroup], settings: Settings) -> Figures:
    """Return the figures of our layouts."""
    memory = [group_costs(each, settings) for each in planned]
    return _figures(model, planned, settings, memory, states_of(planned, settings.optimizer))


def states_of(planned: Sequence[PlannedGroup], optimizer: OptimizerName) -> int:
    """Return the bytes of optimizer states of the rank that has most of them."""
    by_rank = Counter[int]()
    for each in planned:
        for index, tensor in enumerate(each.group.tensors):
            for rank, start, stop in each.layout.shard_ranges(index):
                by_rank[rank] += each.unit.count * state_bytes(
                    tensor, each.group, each.unit, optimizer, stop - start
                )
    return max(by_rank.values(), default=0)


def scratch_of(planned: Sequence[PlannedGroup], optimizer: OptimizerName, backend: Backend) -> int:
    """Return the bytes that an optimizer allocates and frees in its step, on the rank with most.

    With streams torch's ``foreach`` optimizers make one copy of all shards. So much is counted for
    other optimizers than torch's too. On the CPU torch updates one tensor after the other: AdamW
    has a square root and a quotient of it, and still the quotient of the tensor before. So it has
    at most twice the largest tensor and once the second largest. Fused kernels have nothing.
    """
    trained = [each for each in planned if each.group.trainable]
    if optimizer.endswith("_fused"):
        return 0
    if backend == "nccl" or optimizer not in _ONE_BY_ONE:
        return sum(
            each.unit.count * each.layout.shard_size * each.group.dtype.itemsize for each in trained
        )
    largest: dict[int, tuple[int, int]] = {}  # the two largest, by rank
    for each in trained:
        for index in range(len(each.group.tensors)):
            for rank, start, stop in each.layout.shard_ranges(index):
                size = (stop - start) * each.group.dtype.itemsize
                sizes = (*largest.get(rank, (0, 0)), *[size] * min(each.unit.count, 2))
                second, first = sorted(sizes)[-2:]
                largest[rank] = first, second
    return max((2 * first + second for first, second in largest.values()), default=0)


def figures_of_others(
    model: Model,
    planned: Sequence[PlannedGroup],
    settings: Settings,
    shard_elements: Callable[[PlannedGroup], int],
) -> Figures:
    """Return the figures of another engine's layout, with the buffers of our engine.

    Only the layout differs, and nothing is sent in 8 bits. Optimizer states are counted for the
    whole shard, in proportion to the group's tensors.
    """
    optimizer_bytes = 0
    for each in planned:
        whole = sum(
            state_bytes(tensor, each.group, each.unit, settings.optimizer, tensor.numel)
            for tensor in each.group.tensors
        )
        share = whole * shard_elements(each) / max(each.group.numel, 1)
        optimizer_bytes += each.unit.count * round(share)
    memory = [_plain_costs(each, shard_elements(each), settings) for each in planned]
    return _figures(model, planned, settings, memory, optimizer_bytes)


def _figures(
    model: Model,
    planned: Sequence[PlannedGroup],
    settings: Settings,
    memory: Sequence[GroupCosts],
    optimizer_bytes: int,
) -> Figures:
    by_unit: dict[int, list[GroupCosts]] = {}
    for each, own in zip(planned, memory, strict=True):
        by_unit.setdefault(id(each.unit), []).append(own)
    kinds = [
        UnitCosts(
            unit.title, tuple(by_unit.get(id(unit), ())), unit.is_root, _keeps(unit, settings)
        )
        for unit in model.units
    ]
    units = [kinds[index] for index in model.order]
    groups = [group for unit in units for group in unit.groups]
    num_elements = sum(group.shard_elements for group in groups)
    padding = num_elements * settings.num_resting_shards - model.num_parameters
    step = run_step(units, how_of(settings), model.trace)
    traffic = traffic_of(units, step, settings)
    return Figures(
        shard_elements=num_elements,
        padding_elements=padding,
        padding_ratio=padding / model.num_parameters if model.num_parameters else 0.0,
        weights_bytes=sum(group.shard_bytes for group in groups),
        gradients_bytes=sum(group.shard_bytes for group in groups if group.trainable),
        optimizer_bytes=optimizer_bytes,
        peak=step.peak,
        traffic=traffic,
        communication_s=traffic.total_bytes / settings.bandwidth_bytes_per_s,
    )


def how_of(settings: Settings) -> How:
    """Return the settings that a simulated step depends on."""
    return How(
        settings.backend,
        settings.row,
        settings.num_summed,
        settings.in_flight,
        settings.micro_batches,
        settings.offload,
        num_outer=settings.num_outer,
    )


def _keeps(unit: Unit, settings: Settings) -> bool:
    """Whether the unit stays unsharded from forward to backward."""
    if not settings.row.cuts_parameters:
        return True
    return unit.is_root if settings.reshard is None else not settings.reshard


def _plain_costs(each: PlannedGroup, shard_elements: int, settings: Settings) -> GroupCosts:
    dtype = each.group.dtype
    return GroupCosts(
        shard_elements=shard_elements,
        num_shards=settings.num_shards,
        tensors=tuple(tensor.numel for tensor in each.group.tensors),
        shard_dtype=dtype,
        compute_dtype=settings.compute_dtype if dtype.floating else dtype,
        reduce_dtype=settings.reduce_dtype if dtype.floating else dtype,
        trainable=each.group.trainable,
        num_outer=settings.num_outer,
    )


def group_costs(each: PlannedGroup, settings: Settings) -> GroupCosts:
    """Return the sizes of a group, with those of its 8-bit messages. One rank sends no gradients.

    With shards over the replicas too, an inner shard has as many messages as there are replicas.
    """
    costs = _plain_costs(each, each.layout.shard_size, settings)
    gather = each.message_bytes(costs.compute_dtype, reduces=False)
    reduces = each.group.trainable and costs.num_shards > 1
    reduce = each.message_bytes(costs.reduce_dtype, reduces=True) if reduces else None
    return dataclasses.replace(
        costs,
        gather_message=None if gather is None else gather * settings.num_outer,
        reduce_message=None if reduce is None else reduce * settings.num_outer,
    )


def traffic_of(units: Sequence[UnitCosts], step: Step, settings: Settings) -> Traffic:
    """Return the bytes that a rank sends in a step."""
    others, replicas = settings.num_shards - 1, settings.num_summed
    trained = [group for unit in units for group in unit.groups if group.trainable]

    def gathers(which: Sequence[int]) -> int:
        groups = (group for index in which for group in units[index].groups)
        return others * sum(group.gathered_message for group in groups)

    def sent(group: GroupCosts) -> int:
        if group.reduce_message is not None:
            return others * group.reduce_message
        is_narrow = settings.backend == "gloo" and not is_summed
        dtype = group.copied_dtype if is_narrow else group.reduce_dtype
        return others * group.inner_elements * dtype.itemsize

    def replicated(group: GroupCosts) -> int:
        sums = group.inner_elements * group.reduce_dtype.itemsize
        if settings.num_outer == 1:
            return reductions * (2 * (replicas - 1) * sums // replicas)
        weights = group.shard_elements * group.compute_dtype.itemsize
        return (replicas - 1) * (reductions * sums // replicas + weights)

    reductions = settings.micro_batches if settings.row.cuts_gradients else 1
    is_summed = settings.micro_batches > 1 and not settings.row.cuts_gradients
    return Traffic(
        gather_forward_bytes=gathers(step.forward_gathers),
        gather_backward_bytes=gathers(step.backward_gathers),
        reduce_bytes=reductions * sum(sent(group) for group in trained),
        replicate_bytes=sum(replicated(group) for group in trained),
    )
