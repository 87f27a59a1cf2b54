"""Applies a candidate: the calls of ``fully_shard`` that a user would write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from vescale_fsdp import QuantizedGather, QuantizedReduce
from vescale_fsdp.spi import Roles
from vescale_fsdp_tune.costs.problem import Candidate

Shard = Callable[..., Any]


def apply(
    module: nn.Module,
    candidate: Candidate,
    shard: Shard,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    unit_mp_policy: MixedPrecisionPolicy | None = None,
) -> None:
    """Shard a module with the settings of a candidate, units first.

    Args:
        shard: ``fully_shard`` with the arguments that the candidate does not have.
        mesh: of one or two axes.
        mp_policy: of the root.
        unit_mp_policy: of the other units. None: ``mp_policy`` without its ``output_dtype``.

    Raises:
        ValueError: the candidate is for another model or another mesh.
    """
    units = list(units_of(module, candidate))
    mesh = mesh_of(candidate, mesh)
    below = unit_mp_policy or replace(mp_policy, output_dtype=None)
    hidden = _hidden(module, candidate)
    for unit, settings in zip(units, settings_of_units(candidate, mesh), strict=True):
        if not any(id(param) in hidden for param in _parameters(unit)):
            settings.pop("gather_codec", None)  # a head alone is not known as one
        shard(unit, mesh=mesh, mp_policy=below, **settings)
    shard(module, mesh=mesh, mp_policy=mp_policy, **_common(candidate, mesh))


def units_of(module: nn.Module, candidate: Candidate) -> Iterator[nn.Module | list[nn.Module]]:
    """Yield the module, or the modules, of each unit but the root.

    Raises:
        ValueError: the module has none of a name.
    """
    known = dict(module.named_modules())
    for names in candidate.units:
        missing = [name for name in names if name not in known]
        if missing:
            raise ValueError(
                f"fully_shard: the choice of settings has a unit {missing[0]!r}, and "
                f"{type(module).__name__} has no such module; it was made for another model"
            )
        members = [known[name] for name in names]
        yield members[0] if len(members) == 1 else members


def mesh_of(candidate: Candidate, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the candidate. Collective if it has replicas and ``mesh`` has one axis.

    Raises:
        ValueError: ``mesh`` has other sizes.
    """
    replicas = candidate.num_replicas
    if mesh.ndim == 2 and mesh.size(0) == replicas:
        return mesh
    if mesh.ndim == 1 and mesh.size() % replicas == 0:
        if replicas == 1:
            return mesh
        sizes = (replicas, mesh.size() // replicas)
        return init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("replicate", "shard"))
    raise ValueError(
        f"fully_shard: the choice of settings is for {replicas} replicas, and the mesh is {mesh}"
    )


def settings_of_units(candidate: Candidate, mesh: DeviceMesh) -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``fully_shard`` for each unit but the root."""
    first_unsharded = len(candidate.units) - candidate.num_unsharded
    for number in range(len(candidate.units)):
        settings = _common(candidate, mesh)
        if candidate.sharding in ("zero3", "hsdp", "hsdp_zero1"):
            settings["reshard_after_forward"] = number < first_unsharded
        if number < candidate.num_changed and candidate.activations != "keep":
            settings["activations"] = candidate.activations
        yield settings


def _parameters(unit: nn.Module | list[nn.Module]) -> Iterator[nn.Parameter]:
    for module in unit if isinstance(unit, list) else [unit]:
        yield from module.parameters()


def _hidden(module: nn.Module, candidate: Candidate) -> set[int]:
    """Return ``id(param)`` of the matrices of hidden layers, by the model around them."""
    if not candidate.int8:
        return set()
    roles = Roles([module], has_blocks=bool(candidate.units))
    return {
        id(param)
        for child_name, child in module.named_modules()
        for name, param in child._parameters.items()
        if param is not None and roles.is_hidden(f"{child_name}.{name}", param, [child])
    }


def _common(candidate: Candidate, mesh: DeviceMesh) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "sharding": candidate.sharding,
        "in_flight": candidate.in_flight,
    }
    if candidate.int8:
        settings["gather_codec"], settings["reduce_codec"] = QuantizedGather(), QuantizedReduce()
    if candidate.offload:
        pins = mesh.device_type != "cpu"
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=pins)
    return settings
