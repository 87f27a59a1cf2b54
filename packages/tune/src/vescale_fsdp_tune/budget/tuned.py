"""``fully_shard(model, budget=...)``: chooses settings, shards with them, and prints the choice."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

import vescale_fsdp
from vescale_fsdp import Granularity, refuse_other_engines
from vescale_fsdp.errors import PlanError
from vescale_fsdp.spi import (
    Axes,
    GranularityPolicy,
    asked_block,
    check_arguments,
    check_engine_arguments,
    checked_modules,
    default_mesh,
    devices,
    limit_s,
    over,
    units_in,
)
from vescale_fsdp_tune.budget.apply import apply
from vescale_fsdp_tune.budget.choose import choose
from vescale_fsdp_tune.budget.merging import result_of
from vescale_fsdp_tune.budget.request import Budget
from vescale_fsdp_tune.budget.trials import Subject
from vescale_fsdp_tune.costs.choice_file import Choice, read_choice, write_choice
from vescale_fsdp_tune.costs.layouts import BlockOf
from vescale_fsdp_tune.costs.model import Tensor
from vescale_fsdp_tune.costs.problem import Tuning, split_anywhere
from vescale_fsdp_tune.costs.report import report_of

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_TUNINGS: weakref.WeakKeyDictionary[nn.Module, Tuning]
_TUNINGS = weakref.WeakKeyDictionary()


def tuning_of(model: nn.Module) -> Tuning | None:
    """Return what ``fully_shard(model, budget=...)`` has chosen, and from what.

    ``tuning_of(model).chosen.candidate`` has the settings.

    Returns:
        None if the model was sharded without a budget, or by a written choice.
    """
    return _TUNINGS.get(model)


# Arguments of the core's ``fully_shard`` that a budget chooses, or that it cannot pass on.
_CHOSEN: Mapping[str, Any] = {  # with their defaults
    "sharding": None,
    "accumulate": None,
    "reshard_after_forward": None,
    "in_flight": 2,
    "activations": None,
    "gather_codec": None,
    "reduce_codec": None,
    "offload_policy": OffloadPolicy(),
    "shard_placement_fn": None,
    "dp_mesh_dims": None,
}


def fully_shard(
    module: ModuleT,
    *,
    budget: Budget | str | int | PathLike[str],
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    ignored_params: set[nn.Parameter] | None = None,
    granularity: Granularity | GranularityPolicy | None = None,
    unused: Literal["auto", "zeros"] = "auto",
    broadcast_buffers: bool = False,
    **chosen: Any,
) -> ModuleT:
    """Shard a whole model with the fastest settings that fit a budget of memory. Collective.

    It finds the units, calls ``vescale_fsdp.fully_shard`` for each, and chooses ``sharding``,
    ``reshard_after_forward``, ``in_flight``, ``activations``, and only if the `Budget` allows it
    codecs and ``offload_policy``: the fastest that fit, by a prediction.

    Args:
        budget: the memory of a rank: ``"10GiB"``, ``"80%"`` of the device, ``"auto"``, a number of
            bytes, a `Budget` with the inputs of a forward, or the path of a written choice.
        mesh: one axis to shard over, or two: replicas and shards. Default: all ranks, and the
            number of replicas is chosen, too.
        mp_policy, ignored_params, granularity, unused, broadcast_buffers: as of
            ``vescale_fsdp.fully_shard``. The prediction takes all parameters in ``param_dtype``,
            also those for which ``param_dtype_override_fn`` returns another.
        chosen: its other arguments, with which this raises.

    Returns:
        ``module`` itself.

    Cost: network and blocks are measured on all ranks for a few seconds; a written choice measures
    nothing. Rank 0 prints the candidates.

    Raises:
        ValueError: an argument was passed that the budget chooses, the model has units already, or
            an argument is wrong, as in ``vescale_fsdp.fully_shard``.
        NotImplementedError: parameters are DTensors.
        PlanError: nothing fits the budget, or the model does not run with its inputs.
    """
    if unknown := sorted(chosen.keys() - _CHOSEN.keys()):
        raise TypeError(f"fully_shard() got an unexpected keyword argument {unknown[0]!r}")
    for each in checked_modules(module):
        refuse_other_engines(each, "for all of it")
    check_arguments(None, granularity)
    check_engine_arguments(mp_policy, OffloadPolicy(), unused, 2, broadcast_buffers)
    budget = Budget.of(budget)
    _check(module, chosen)
    passed: dict[str, Any] = {
        "ignored_params": ignored_params,
        "granularity": granularity,
        "unused": unused,
        "broadcast_buffers": broadcast_buffers,
    }
    shard = partial(vescale_fsdp.fully_shard, **passed)
    is_given = mesh is not None
    mesh = default_mesh() if mesh is None else mesh
    ranks, units = Axes.of(mesh).ranks, budget.unit_mp_policy
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
        apply(module, choice.candidate, shard, mesh, mp_policy, units)
        return module
    device = devices.current_device(mesh.device_type)
    subject = Subject(module, device, mp_policy, budget, ignored_params or ())
    blocks = _blocks_of(module, granularity)
    problem, tuning = choose(subject, mesh, vescale_fsdp.fully_shard, blocks, is_given=is_given)
    if budget.save_to is not None:
        write = partial(write_choice, budget.save_to, problem, tuning)
        result_of("written choice", ranks, ranks[0], write)
    apply(module, tuning.chosen.candidate, shard, mesh, mp_policy, units)
    _TUNINGS[module] = tuning
    if dist.get_rank() == ranks[0]:
        sys.stdout.write(f"{report_of(problem, tuning)}\n")
        sys.stdout.flush()
    return module


def _check(module: object, chosen: Mapping[str, Any]) -> None:
    """Raise for a module that cannot be sharded by a budget, and for arguments that it chooses."""
    for name, value in chosen.items():
        if value != _CHOSEN[name]:
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
