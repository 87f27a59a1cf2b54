"""``fully_shard(model, budget=...)``: chooses settings, shards with them, and prints the choice."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from vescale_fsdp import devices
from vescale_fsdp.costs import (
    BlockOf,
    Choice,
    Tensor,
    Tuning,
    read_choice,
    report_of,
    split_anywhere,
    write_choice,
)
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.budget.apply import Shard, apply
from vescale_fsdp.engine.budget.choose import choose
from vescale_fsdp.engine.budget.merging import result_of
from vescale_fsdp.engine.budget.request import Budget
from vescale_fsdp.engine.budget.trials import Subject
from vescale_fsdp.engine.granularity import Granularity, GranularityPolicy, asked_block
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.errors import PlanError
from vescale_fsdp.ranks import limit_s, over

_TUNINGS: weakref.WeakKeyDictionary[nn.Module, Tuning]
_TUNINGS = weakref.WeakKeyDictionary()


def tuning_of(model: nn.Module) -> Tuning | None:
    """Return what ``fully_shard(model, budget=...)`` has chosen, and from what.

    ``tuning_of(model).chosen.candidate`` has the settings.

    Returns:
        None if the model was sharded without a budget, or by a written choice.
    """
    return _TUNINGS.get(model)


# Arguments that a budget chooses, or that it cannot pass on, with other defaults than None.
_DEFAULTS: Mapping[str, Any] = {"in_flight": 2, "offload_policy": OffloadPolicy()}


def check_budget(module: object, others: Mapping[str, Any]) -> None:
    """Raise for a module that cannot be sharded by a budget, and for arguments that it chooses.

    Args:
        others: the arguments that a budget chooses, or that it cannot pass on, by name.

    Raises:
        ValueError: as above.
        NotImplementedError: parameters are DTensors.
    """
    for name, value in others.items():
        if value != _DEFAULTS.get(name):
            raise ValueError(
                f"fully_shard: budget= chooses {name}, and {name}={value!r} was passed too; leave "
                "one of them out"
            )
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"fully_shard: budget= is for a whole model, got a {type(module).__name__}; it finds "
            "the units itself"
        )
    inside = [name or "the module itself" for name in units_in(module)]
    if inside:
        raise ValueError(
            f"fully_shard: budget= finds the units itself, and {inside[0]} is one already; call "
            "it with budget= once, on a model without units"
        )
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise NotImplementedError(
                f"fully_shard: budget= is not for models with tensor or expert parallelism yet, "
                f"and {name} is a DTensor; choose settings with vescale-fsdp tune"
            )
        if is_lazy(param):
            raise ValueError(
                f"fully_shard: budget= needs the shapes of all parameters, and {name} is lazy; run "
                "a forward first"
            )


def shard_within(
    module: nn.Module,
    budget: Budget,
    shard: Shard,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    passed: Mapping[str, Any],
    *,
    is_given: bool,
) -> None:
    """Shard a model with the fastest settings that fit. Collective. See ``fully_shard``.

    Args:
        shard: ``fully_shard``.
        passed: its arguments that the budget does not choose.
        is_given: the mesh is the user's. If not, replicas may be chosen (HSDP).
    """
    ranks = Axes.of(mesh).ranks
    units, shard_with = budget.unit_mp_policy, partial(shard, **passed)
    kind = "an amount of memory" if budget.path is None else "a written choice"
    advice = "Pass the same budget to fully_shard on every rank"
    over(ranks).agree("budget", [kind], advice, timeout_s=limit_s(may_be_late=True))
    if budget.path is not None:
        choice = result_of("written choice", ranks, ranks[0], partial(_read, budget.path))
        if choice.num_ranks != mesh.size():
            raise ValueError(
                f"fully_shard: {budget.path} has the settings for {choice.num_ranks} ranks, and "
                f"the mesh has {mesh.size()}; choose again with a budget"
            )
        apply(module, choice.candidate, shard_with, mesh, mp_policy, units)
        return
    device = devices.current_device(mesh.device_type)
    subject = Subject(module, device, mp_policy, budget, passed["ignored_params"] or ())
    blocks = _blocks_of(module, passed["granularity"])
    problem, tuning = choose(subject, mesh, shard, blocks, is_given=is_given)
    if budget.save_to is not None:
        write = partial(write_choice, budget.save_to, problem, tuning)
        result_of("written choice", ranks, ranks[0], write)
    apply(module, tuning.chosen.candidate, shard_with, mesh, mp_policy, units)
    _TUNINGS[module] = tuning
    if dist.get_rank() == ranks[0]:
        sys.stdout.write(f"{report_of(problem, tuning)}\n")
        sys.stdout.flush()


def _read(path: str) -> Choice:
    try:
        return read_choice(path)
    except ValueError as error:
        raise PlanError(str(error)) from error


def _blocks_of(module: nn.Module, granularity: Granularity | GranularityPolicy | None) -> BlockOf:
    """Return the function from a tensor of a unit to its block, in elements."""
    if granularity is None:
        return split_anywhere

    def block_of(tensor: Tensor) -> int | None:
        own = re.sub(r"^\d+\.", "", tensor.name)  # without the place of its module in a unit
        for name, param in module.named_parameters():
            is_it = f".{name}".endswith((f".{tensor.name}", f".{own}"))
            if is_it and tuple(param.shape) == tensor.shape:
                return asked_block(granularity, own, param)
        return None

    return block_of
