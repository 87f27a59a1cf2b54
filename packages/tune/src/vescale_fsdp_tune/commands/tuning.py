"""Makes the problem of ``vescale-fsdp tune`` from its options: times, activations, machine.

Without a device to measure on, times of blocks are computed: the operations of their matrix
products, divided by the rate that the hardware reaches. They are counted in a forward on the meta
device, attention included, as if it had no mask. For a shapes file they are 2 for each parameter
and token, without attention; of experts the share that a token uses. A backward takes twice as long
as a forward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from vescale_fsdp.cli.text import InputError
from vescale_fsdp_tune.commands.settings import BlockRules, Settings
from vescale_fsdp_tune.costs.amount import Amount
from vescale_fsdp_tune.costs.hardware import HARDWARE, published
from vescale_fsdp_tune.costs.machine import Link, Machine
from vescale_fsdp_tune.costs.model import Model, Tensor, Unit
from vescale_fsdp_tune.costs.problem import BlockTimes, Division, Extra, Problem
from vescale_fsdp_tune.costs.settings import Activations

if TYPE_CHECKING:
    from torch import nn

_Units: TypeAlias = "tuple[Model, list[nn.Module]]"  # a model, and its units but the root

_LOOKED_UP = ("emb", "position", "wte", "wpe")  # beginnings of words for tables, not multiplied


@dataclass(frozen=True)
class Work:
    """What the times and activations of a model come from.

    Attributes:
        settings: with the inputs.
        experts: the share of its experts that a token uses; None: that of the model's config.
        measures: whether to time blocks on a device of this machine.
    """

    settings: Settings
    experts: float | None = None
    measures: bool = False


def machine_of(gpu: str, ranks_per_node: int | None, bandwidth: float | None) -> Machine:
    """Return published hardware, with what the user knows better.

    Args:
        ranks_per_node: None: as published.
        bandwidth: of one rank between nodes, in bytes per second. None: as published.

    Raises:
        InputError: there is no such hardware.
    """
    if gpu not in HARDWARE:
        raise InputError(f"--gpu is {gpu!r}, expected one of {', '.join(HARDWARE)}")
    machine = published(gpu).machine()
    if ranks_per_node is not None:
        machine = replace(machine, ranks_per_node=ranks_per_node)
    if bandwidth is not None:
        between = machine.between
        machine = replace(machine, between=Link(bandwidth, between.latency_s, between.hop_s))
    return machine


def parse_budget(text: str, memory_bytes: int) -> int:
    """Parse ``10GiB``, ``80%`` (of the memory), ``auto`` (90% of it). Raises InputError."""
    try:
        return Amount.parse(text).bytes_of(memory_bytes, memory_bytes)
    except ValueError:
        raise InputError(
            f"--budget is {text!r}, expected a size as 10GiB, a share as 80%, or auto"
        ) from None


def parse_allowed(text: str | None) -> frozenset[Extra]:
    """Parse ``int8,offload``. Raises InputError."""
    found = set()
    for name in [] if text is None else text.split(","):
        if name not in ("int8", "offload"):
            raise InputError(f"--allow is {text!r}, expected int8, offload or both: int8,offload")
        found.add(name)
    return frozenset(found)  # type: ignore[arg-type]


def parse_experts(text: str) -> float:
    """Parse ``8/256``, experts that a token uses of all. Raises InputError."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not found or int(found[1]) > int(found[2]):
        raise InputError(f"--experts is {text!r}, expected those that a token uses of all: 8/256")
    return int(found[1]) / int(found[2])


def problem_of(
    model: Model,
    work: Work,
    machine: Machine,
    budget_bytes: int,
    micro_batches: int,
    allowed: frozenset[Extra],
    rules: Sequence[str],
) -> tuple[Problem, str]:
    """Return the problem, and in a few words where the times of blocks come from.

    Raises:
        InputError: there are no inputs, or the model does not run on them.
    """
    settings = work.settings
    if not settings.has_inputs:
        raise InputError(
            "tune needs --batch (sequences of one rank x tokens of each, as 4x4096) or --inputs: "
            "how long a step takes depends on it"
        )
    if model.module is None:
        if settings.batch is None:
            raise InputError(f"--inputs needs the code of the model, and {model.name} is shapes")
        share = 1.0 if work.experts is None else work.experts
        times, source = _by_parameters(model, settings.batch, share, machine)
        divisions = [Division(model, times)]
        source += "; activations are not counted: leave memory for them"
    elif work.measures:
        divisions, source = _measured(model, settings, allowed, budget_bytes)
    else:
        divisions = _computed(model, settings, allowed, machine, budget_bytes)
        source = "operations of matrix products, counted in a forward without values"
    problem = Problem(
        tuple(divisions),
        settings.num_ranks,
        machine,
        budget_bytes,
        settings.compute_dtype,
        settings.reduce_dtype,
        settings.optimizer,
        micro_batches,
        allowed,
        BlockRules(rules).block,
    )
    return problem, source


def _by_parameters(
    model: Model, batch: tuple[int, int], experts: float, machine: Machine
) -> tuple[tuple[BlockTimes, ...], str]:
    tokens = batch[0] * batch[1]
    used = [
        sum(_used(tensor, unit, experts) for group in unit.groups for tensor in group.tensors)
        for unit in model.units
    ]
    times = tuple(_times(2 * tokens * number, machine) for number in used)
    of_experts = "" if experts == 1.0 else f", {experts:.3g} of experts"
    return times, f"2 operations for each parameter and token{of_experts}, no attention"


def _used(tensor: Tensor, unit: Unit, experts: float) -> float:
    """Return how many elements of a tensor multiply a token."""
    words = re.split(r"[._]", tensor.name.lower())
    is_table = unit.is_root and any(word.startswith(_LOOKED_UP) for word in words)
    if is_table or not tensor.is_matrix:
        return 0.0
    return tensor.numel * (experts if ".experts." in f".{tensor.name}" else 1.0)


def _times(operations: float, machine: Machine) -> BlockTimes:
    forward_s = operations / machine.flops_per_s
    return BlockTimes(forward_s, 2 * forward_s, forward_s)


def _models(model: Model, settings: Settings, budget_bytes: int) -> list[_Units]:
    """Return the model with its usual units, and with smaller ones if these are large."""
    from vescale_fsdp_tune.budget import describe, divisions_to_try  # loads torch

    dtypes = {group.dtype for unit in model.units for group in unit.groups if group.dtype.floating}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    itemsize = settings.compute_dtype.itemsize
    usual, *others = divisions_to_try(model.module, budget_bytes, itemsize, has_inputs=True)
    smaller = [(describe(model.module, each, model.name, dtype), each) for each in others]
    return [(model, usual), *smaller]


def _computed(
    model: Model,
    settings: Settings,
    allowed: frozenset[Extra],
    machine: Machine,
    budget_bytes: int,
) -> list[Division]:
    """Trace the model on the meta device, and count its operations."""
    from vescale_fsdp_tune.commands.activations import operations_of, trace_of  # loads torch

    modes: list[Activations] = ["keep"]
    if len(model.order) > 1:
        modes.append("recompute")
        if "offload" in allowed:
            modes += ["offload", "recompute+offload"]
    models = _models(model, settings, budget_bytes)  # before parameters get the dtype of compute
    total, inside = operations_of(model, settings)
    return [
        Division(
            each,
            _by_operations(each, total, inside, machine),
            {mode: trace_of(each, settings, mode, blocks) for mode in modes},
        )
        for each, blocks in models
    ]


def _by_operations(
    model: Model, total: int, inside: Mapping[str, int], machine: Machine
) -> tuple[BlockTimes, ...]:
    by_unit: dict[int, list[int]] = {}
    for index, names in zip(model.order[1:], model.modules[1:], strict=True):
        by_unit.setdefault(index, []).append(sum(inside.get(name, 0) for name in names))
    means = {index: sum(each) / len(each) for index, each in by_unit.items()}
    means[0] = max(total - sum(sum(each) for each in by_unit.values()), 0)
    return tuple(_times(means[index], machine) for index in range(len(model.units)))


def _measured(
    model: Model, settings: Settings, allowed: frozenset[Extra], budget_bytes: int
) -> tuple[list[Division], str]:
    """Time the blocks on a device of this machine."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from vescale_fsdp.spi import devices
    from vescale_fsdp_tune.budget import Budget, Subject, divide
    from vescale_fsdp_tune.commands.activations import inputs_of

    device = devices.current_device(devices.accelerator_type() or "cpu")
    args, kwargs = inputs_of(model, settings)
    names = settings.compute_dtype.name, settings.reduce_dtype.name
    dtypes: Any = [getattr(torch, name) for name in names]
    budget = Budget(inputs=(args, kwargs), allow=allowed)
    subject = Subject(model.module, device, MixedPrecisionPolicy(*dtypes), budget)
    models = _models(model, settings, budget_bytes)
    divisions = []
    for described, blocks in models:
        division = divide(subject, blocks)
        # It leaves out modules that cannot be units.
        is_same = division.model.modules == described.modules
        divisions.append(replace(division, model=described) if is_same else division)
    return divisions, f"measured on {device.type}"
