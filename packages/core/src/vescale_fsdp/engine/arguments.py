"""Checks of ``fully_shard``'s arguments, with errors and warnings.

An error that FSDP2 has too has the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from vescale_fsdp import devices
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.unit import Unit, unit_of
from vescale_fsdp.errors import warn_user

Activations: TypeAlias = (
    Literal["recompute", "offload", "recompute+offload"] | Callable[..., Any] | Sequence[Any]
)

# Settings of the root that hold for the whole model: the attribute of a unit, and its default.
_ARGUMENTS_OF_ROOTS: Mapping[str, tuple[str, Any]] = {
    "unused": ("unused", "auto"),
    "in_flight": ("in_flight", 2),
    "broadcast_buffers": ("broadcasts_buffers", False),
}
_SETTERS_OF_ROOTS: Mapping[str, tuple[str, Any]] = {
    "set_reduce_scatter_unused_params": ("gives_zeros", False),
    "set_post_optim_event": ("post_optim_event", None),
}


def checked_modules(module: object) -> list[nn.Module]:
    """The modules of one unit: ``module``, or those of a list that are not inside another of them.

    Raises:
        ValueError: not a module, or a container without a forward.
        AssertionError: one of them is a unit already.
    """
    modules: list[Any] = list(module) if isinstance(module, list | tuple) else [module]
    if not modules:
        raise ValueError("fully_shard expects a module or modules, got an empty list")
    for each in modules:
        _check_module(each)
    inner = {id(below) for each in modules for below in each.modules() if below is not each}
    return [each for each in dict.fromkeys(modules) if id(each) not in inner]


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(f"fully_shard expects a module, got {type(module).__name__}")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and (
        type(module).forward in (nn.ModuleList.forward, nn.ModuleDict.forward)
    ):
        raise ValueError(
            "fully_shard does not support containers that do not implement forward: "
            f"{type(module).__name__}({len(module)} modules). Shard each of them, or pass a list: "
            "they then form one unit"
        )
    if unit_of(module) is not None:
        raise AssertionError(
            "Each distinct composable distributed API can only be applied to a module once. "
            "fully_shard has already been applied to this module, of the class "
            f"{type(module).__name__}. Call it once for each module, inner ones first, and on the "
            "whole model last"
        )


def check_arguments(reshard_after_forward: object, granularity: object) -> None:
    """Raise for a wrong ``reshard_after_forward`` or ``granularity``."""
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool | int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {reshard_after_forward}"
        )
    if granularity is not None:
        from vescale_fsdp.engine.granularity import check_granularity

        check_granularity(granularity)


def check_engine_arguments(
    mp_policy: object,
    offload_policy: object,
    unused: object,
    in_flight: object,
    broadcast_buffers: object,
) -> None:
    """Raise for a wrong policy, or a wrong value of an argument that FSDP2 does not have."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"fully_shard: mp_policy must be a MixedPrecisionPolicy, got {mp_policy!r}; for one "
            "dtype write MixedPrecisionPolicy(param_dtype=...)"
        )
    if not isinstance(offload_policy, OffloadPolicy | None):
        raise TypeError(
            f"fully_shard: offload_policy must be an OffloadPolicy, got {offload_policy!r}"
        )
    pins = isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory
    if pins and not devices.has_accelerator():
        raise RuntimeError(
            "Cannot access accelerator device when none is available.\n"
            "CPUOffloadPolicy pins memory for copies to it; pass pin_memory=False"
        )
    if unused not in ("auto", "zeros"):
        raise ValueError(f"fully_shard: unused must be 'auto' or 'zeros', got {unused!r}")
    if not isinstance(in_flight, int) or isinstance(in_flight, bool) or in_flight < 1:
        raise ValueError(f"fully_shard: in_flight must be an int of at least 1, got {in_flight!r}")
    if not isinstance(broadcast_buffers, bool):
        raise ValueError(
            f"fully_shard: broadcast_buffers must be True or False, got {broadcast_buffers!r}"
        )


_OVERRIDE = "param_dtype_override_fn"  # of a policy, since torch 2.15


def without_override(
    policy: MixedPrecisionPolicy, param_dtype: torch.dtype | None = None
) -> MixedPrecisionPolicy:
    """The policy without a function that chooses dtypes; with ``param_dtype``, if it is given."""
    changes: dict[str, Any] = {} if param_dtype is None else {"param_dtype": param_dtype}
    if any(each.name == _OVERRIDE for each in fields(policy)):
        changes[_OVERRIDE] = None
    return replace(policy, **changes)


def resolved_policy(
    policy: MixedPrecisionPolicy, param: nn.Parameter, fqn: str
) -> MixedPrecisionPolicy:
    """The policy for one parameter: ``param_dtype_override_fn`` may choose another ``param_dtype``.

    Raises:
        ValueError: it returns no dtype, or one that is neither that of the policy nor that of the
            parameter.
    """
    choose = getattr(policy, _OVERRIDE, None)
    dtype = None if choose is None else choose(param)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(
            "param_dtype_override_fn must return a torch.dtype or None but got "
            f"{type(dtype)} for parameter {fqn!r}"
        )
    if dtype not in (None, policy.param_dtype, param.dtype):
        raise ValueError(
            "param_dtype_override_fn must return None, param_dtype, or the parameter's original "
            f"dtype but got {dtype} for a parameter with dtype {param.dtype} and param_dtype "
            f"{policy.param_dtype}: {fqn!r}"
        )
    return without_override(policy, dtype)


def warn_of_settings_below(root: Unit, units: Mapping[str, Unit]) -> None:
    """Warn of settings that have an effect only on the root, but were set on other units.

    Args:
        root: the root of the model.
        units: all units of the model, with the root, by name.
    """
    place = f"the root, which is the outermost module ({root.kind})"
    for name, (attribute, default) in _ARGUMENTS_OF_ROOTS.items():
        holds = getattr(root, attribute)
        others = _others(units, attribute, default, holds)
        if others is not None:
            where, value = others
            warn_user(
                f"fully_shard: {name}={value!r} of {where} has no effect: the root's value holds "
                f"for the whole model. Pass it to {place}; the root has {name}={holds!r}"
            )
    for name, (attribute, default) in _SETTERS_OF_ROOTS.items():
        others = _others(units, attribute, default, getattr(root, attribute))
        if others is not None:
            warn_user(f"{name} of {others[0]} has no effect: call it on {place}")


def _others(
    units: Mapping[str, Unit], attribute: str, default: Any, holds: Any
) -> tuple[str, Any] | None:
    """The units with another value than the root, as a text, and the value of the first one.

    None if all units have the root's value or the default.
    """
    values = {fqn: getattr(unit, attribute) for fqn, unit in units.items()}
    others = {fqn: value for fqn, value in values.items() if value not in (default, holds)}
    if not others:
        return None
    fqn, value = next(iter(others.items()))
    more = "" if len(others) == 1 else f" (and {len(others) - 1} more)"
    return f"{fqn!r}{more}", value


def axes_of(mesh: object, dp_mesh_dims: Any) -> Axes:
    """The axes to shard and replicate over.

    Raises:
        ValueError, AssertionError: ``mesh`` is not a mesh, has more than two axes (without
            ``dp_mesh_dims``) or two unnamed ones, or does not have this rank; or ``dp_mesh_dims``
            names axes that it does not have.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"fully_shard: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if dp_mesh_dims is None:
        if mesh.ndim > 2:
            raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard: rank {dist.get_rank()} is not part of {mesh}; pass a mesh that "
            "contains the rank that calls"
        )
    if dp_mesh_dims is None:
        return Axes.of(mesh)
    shard, replicate = _named_axes(mesh, dp_mesh_dims)
    return Axes.named(mesh, shard, replicate)


def _named_axes(mesh: DeviceMesh, dp_mesh_dims: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the axes to shard over, and of those to replicate over."""
    try:
        shard, replicate = dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names
    except AttributeError:
        raise ValueError(
            "fully_shard: dp_mesh_dims must be a torch.distributed.fsdp.DataParallelMeshDims, got "
            f"{dp_mesh_dims!r}"
        ) from None
    if mesh.mesh_dim_names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*shard, *replicate):
        if name not in mesh.mesh_dim_names:
            raise ValueError(
                f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}"
            )
    return tuple(shard), tuple(replicate)
