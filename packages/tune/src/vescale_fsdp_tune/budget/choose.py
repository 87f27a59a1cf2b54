"""Chooses settings for a budget, the same on all ranks.

::

    all ranks     measure the machine together
    each rank     tries the model
    all ranks     merge: the largest times, the smallest memory
    one rank      searches: the one with the most activations
    all ranks     receive the result
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.spi import REDUCES_IN_OWN_DTYPE, Axes, limit_s, over
from vescale_fsdp_tune.budget.apply import Shard
from vescale_fsdp_tune.budget.machine import measured_machine, mesh_by_node
from vescale_fsdp_tune.budget.merging import Figures, merge_figures, result_of
from vescale_fsdp_tune.budget.trials import Subject, divide
from vescale_fsdp_tune.budget.twins import tensors_of
from vescale_fsdp_tune.budget.units import divisions_to_try
from vescale_fsdp_tune.costs.layouts import BlockOf
from vescale_fsdp_tune.costs.machine import Link, Machine
from vescale_fsdp_tune.costs.model import Dtype
from vescale_fsdp_tune.costs.problem import BlockTimes, Division, Problem, Tuning
from vescale_fsdp_tune.costs.search import tune
from vescale_fsdp_tune.costs.settings import NUM_STATES

# Figures of a machine; those of its links are merged too.
_SMALLEST = (
    "memory_bytes",
    "copy_bytes_per_s",
    "optimizer_elements_per_s",
    "host_bytes_per_s",
    "host_elements_per_s",
)
_LARGEST = (
    "unit_s",
    "collective_s",
    "parameter_s",
    "sending_s_per_byte",
    "summing_s_per_byte",
    "workspace_bytes",
)


def choose(
    subject: Subject, mesh: DeviceMesh, shard: Shard, block_of: BlockOf, *, is_given: bool
) -> tuple[Problem, Tuning]:
    """Return the problem and the result of its search. Collective.

    The result is the same on all ranks. Traces in the problem are those of each rank.

    Args:
        mesh: of one or two axes.
        block_of: the block of each tensor that must not be split.
        is_given: the mesh is the user's, so that the number of replicas is not chosen.

    Raises:
        PlanError: nothing fits, or the model cannot be tried; on all ranks.
        RankMismatchError: ranks have different models or budgets.
    """
    ranks, budget = Axes.of(mesh).ranks, subject.budget
    _compare(subject, ranks)
    dtype = _shard_dtype(subject)
    compute_dtype = subject.policy.param_dtype or dtype
    reduce_dtype = dtype if REDUCES_IN_OWN_DTYPE else compute_dtype
    of_model = sum(t.nbytes for t in tensors_of(subject.module) if t.device == subject.device)
    memory = budget.num_bytes(subject.device, of_model)
    machine = budget.machine
    if machine is None:
        by_node = mesh if is_given else mesh_by_node(mesh)
        machine = measured_machine(mesh, by_node, shard, dtype, memory, subject.budget.optimizer)
    if budget.network is not None:
        machine = dataclasses.replace(machine, inside=budget.network, between=budget.network)
    machine, memory = _merged_machine(machine, memory, ranks)
    divisions: list[Division] = []

    def tried() -> Figures:
        lists = divisions_to_try(
            subject.module,
            memory,
            compute_dtype.itemsize,
            has_inputs=budget.inputs is not None,
        )
        for blocks in lists:
            divisions.append(divide(subject, blocks))
        most = max((trace.highest_bytes for trace in divisions[0].traces.values()), default=0)
        place = len(ranks) - 1 - ranks.index(dist.get_rank())  # of equal ranks the first
        seconds = [s for each in divisions for times in each.times for s in times]
        return Figures([], [most * len(ranks) + place, *seconds])

    most, *merged = merge_figures("times of the model", ranks, tried).largest
    seconds = iter(merged)
    problem = Problem(
        tuple(_with_times(each, seconds) for each in divisions),
        num_ranks=len(ranks),
        machine=machine,
        budget_bytes=memory,
        compute_dtype=_described(compute_dtype),
        reduce_dtype=_described(subject.policy.reduce_dtype or reduce_dtype),
        optimizer=budget.optimizer,
        micro_batches=budget.micro_batches,
        allowed=frozenset(budget.allow),
        block_of=block_of,
        other_bytes=_other_bytes(subject),
        replicas=frozenset({Axes.of(mesh).num_replicas}) if is_given else None,
    )
    speaker = ranks[len(ranks) - 1 - int(most) % len(ranks)]
    return problem, result_of("choice of settings", ranks, speaker, lambda: tune(problem))


def _compare(subject: Subject, ranks: list[int]) -> None:
    budget = subject.budget
    entries = [
        f"optimizer={budget.optimizer!r}, micro_batches={budget.micro_batches}, "
        f"allow={sorted(budget.allow)}, {'without' if budget.inputs is None else 'with'} inputs, "
        f"{'not ' if budget.save_to is None else ''}written"
    ]
    for name, param in subject.module.named_parameters():
        trained = "" if param.requires_grad else ", frozen"
        entries.append(f"parameter {name!r} (shape {tuple(param.shape)}, {param.dtype}{trained})")
    advice = "Pass the same model and the same budget to fully_shard on every rank"
    late = limit_s(may_be_late=True)
    over(ranks).agree("model and its budget", entries, advice, timeout_s=late)


def _merged_machine(machine: Machine, memory: int, ranks: list[int]) -> tuple[Machine, int]:
    """Return the machine and the memory of all ranks. Collective."""

    def own() -> Figures:
        links = (machine.inside, machine.between)
        smallest = [memory, *(getattr(machine, name) for name in _SMALLEST)]
        largest = [getattr(machine, name) for name in _LARGEST]
        return Figures(
            [*smallest, *(link.bytes_per_s for link in links)],
            [*largest, *(link.latency_s for link in links), *(link.hop_s for link in links)],
        )

    (least, *smallest), largest = merge_figures("rates of the machine", ranks, own)
    fields: dict[str, float] = dict(zip(_SMALLEST, smallest, strict=False))
    fields |= dict(zip(_LARGEST, largest, strict=False))
    inside, between = (
        Link(*figures) for figures in zip(smallest[-2:], largest[-4:-2], largest[-2:], strict=True)
    )
    merged = dataclasses.replace(machine, inside=inside, between=between, **fields)  # type: ignore[arg-type]
    return merged, int(least)


def _with_times(division: Division, seconds: Iterator[float]) -> Division:
    times = tuple(BlockTimes(*itertools.islice(seconds, len(each))) for each in division.times)
    return dataclasses.replace(division, times=times)


def _other_bytes(subject: Subject) -> int:
    """Return the bytes of buffers, and of ignored parameters with gradients and states."""
    parameters = {id(param) for param in subject.module.parameters()}
    ignored = {id(param) for param in subject.ignored}
    found = 0
    for tensor in tensors_of(subject.module):
        if id(tensor) in ignored:
            states = NUM_STATES[subject.budget.optimizer]
            found += tensor.nbytes * (2 + states if tensor.requires_grad else 1)
        elif id(tensor) not in parameters:
            found += tensor.nbytes
    return found


def _shard_dtype(subject: Subject) -> torch.dtype:
    """Return the dtype of most of the parameters."""
    sizes: dict[torch.dtype, int] = {}
    for param in subject.module.parameters():
        sizes[param.dtype] = sizes.get(param.dtype, 0) + param.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def _described(dtype: torch.dtype) -> Dtype:
    return Dtype(str(dtype).removeprefix("torch."), dtype.itemsize, dtype.is_floating_point)
