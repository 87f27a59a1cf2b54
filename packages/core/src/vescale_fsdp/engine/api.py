"""fully_shard: the one function that turns a module into a sharded one."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from vescale_fsdp.dbuffer import plain_tensors
from vescale_fsdp.engine.arguments import (
    check_arguments,
    check_engine_arguments,
    check_mesh,
    checked_modules,
)
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.granularity import Granularity, GranularityPolicy
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.hooks import register_hooks
from vescale_fsdp.engine.methods import swap_class
from vescale_fsdp.engine.ownership import mark_taken, own_modules, params_to_shard
from vescale_fsdp.engine.slot import ParamToShard
from vescale_fsdp.engine.unit import Unit, unit_of

__all__ = ["fully_shard", "register_fsdp_forward_method"]

ModuleT = TypeVar("ModuleT", bound=nn.Module | list[nn.Module])


def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    granularity: Granularity | GranularityPolicy | None = None,
    unused: Literal["auto", "exchange", "zeros"] = "auto",
    in_flight: int = 2,
) -> ModuleT:
    """Shard a module's parameters over the ranks of a mesh, in place.

    Call it bottom-up, on the repeated blocks first and on the whole model last: each call makes
    one unit of the parameters that no earlier call has taken. A unit's parameters lie in one
    flat buffer per dtype and trainability, cut into equal shards between whole blocks.

    Args:
        module: any module with a forward, or a list of modules that are one unit together (they
            are gathered from the first one's forward to the last one's). Classes become
            ``FSDP<Class>``.
        mesh: one axis to shard over, or two named ones: the first holds replicas and the
            second shards (HSDP). Default: all ranks, on the accelerator or the CPU.
        reshard_after_forward: free the gathered parameters after forward and gather them again
            in backward. None: yes, except for the root of a model in training.
        mp_policy: dtypes of compute, reduction and outputs. The shards keep the dtype that the
            parameters have now.
        ignored_params: are left alone: not sharded, not reduced.
        granularity: what must not be cut: one for all parameters, or a policy
            ``(fqn, param) -> Granularity | None``. The fqn is relative to ``module``.
            Default: cut anywhere, which costs the least padding.
        unused: parameters that no rank used keep ``.grad`` None. "auto" finds out in the first
            backward and asks again only if some were unused; "exchange" asks after every
            backward; "zeros" never asks.
        in_flight: units gathered at a time (1: no prefetch), and reductions under way. Set on
            the root.

    Returns:
        ``module`` itself.

    Cost: nothing is communicated here. Afterwards, per unit and step: one all-gather in forward,
    one more in backward if it was released, one reduction (with replicas: and one all-reduce of
    the shard); memory between steps is the shard.

    Ranks must call the same units in the same order. A difference in the first pass is an error on
    every rank; later ones are not looked for, unless ``VESCALE_FSDP_CHECK_ORDER=1`` is set, which
    costs a round through the store per gather. Parameters of one unit may be used on some ranks
    only.

    Raises:
        ValueError, AssertionError: what FSDP2 raises for the same mistake, with the same words.
        NotImplementedError: ``shard_placement_fn``, ``CPUOffloadPolicy``, ``dp_mesh_dims``, a
            an int ``reshard_after_forward`` are not there yet.
        PlanError: the parameters cannot be laid out.

    Source: the signature is FSDP2's, then ours; arXiv 2602.22437 for the engine.
    """
    modules = checked_modules(module)
    check_arguments(
        reshard_after_forward, shard_placement_fn, offload_policy, dp_mesh_dims, granularity
    )
    check_engine_arguments(mp_policy, unused, in_flight)
    mesh = _default_mesh() if mesh is None else mesh
    check_mesh(mesh)
    device = _device(mesh)
    params = params_to_shard(modules, set(ignored_params or ()), granularity)
    _move_buffers(modules, device)
    unit = Unit(modules, mp_policy, _as_bool(reshard_after_forward), unused, in_flight)
    with plain_tensors():
        unit.groups = _make_groups(unit, params, Axes.of(mesh), device)
    mark_taken(params, unit)
    for each in modules:
        register_hooks(each)
        swap_class(each)
        for below in each.modules():  # what Dynamo looks for
            below.__dict__["_is_fsdp_managed_module"] = True
            below.__dict__["_fsdp_use_orig_params"] = True
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than ``forward`` gather the module's parameters around itself.

    For example ``generate``, or a Lightning module's ``training_step``. Calls of the module
    inside the method are part of the same pass. Does nothing on a module that is not sharded.

    Raises:
        ValueError: the module has no such method.
    """
    if unit_of(module) is None:
        return
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)
    module_ref = weakref.ref(module)
    function = getattr(method, "__func__", method)  # bound anew: the module owns no cycle

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        owner = module_ref()
        assert owner is not None, "its method is being called"
        unit = unit_of(owner)
        assert unit is not None, "checked at registration"
        output = None
        try:
            args, kwargs = unit.pre_forward(owner, args, kwargs)
            if function is method:
                output = function(*args, **kwargs)
            else:
                output = function(owner, *args, **kwargs)
        finally:
            output = unit.post_forward(output)
        return output

    module.__dict__[method_name] = wrapped


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    device_type = "cpu"
    if torch.accelerator.is_available():  # a build for CUDA names it on machines without one too
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "there is one"
        device_type = accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


def _as_bool(reshard_after_forward: bool | int | None) -> bool | None:
    return None if reshard_after_forward is None else bool(reshard_after_forward)


def _make_groups(
    unit: Unit, params: list[ParamToShard], axes: Axes, device: torch.device
) -> list[Group]:
    """One group per dtype and trainability, in order of first appearance."""
    by_kind: dict[tuple[torch.dtype, bool, bool], list[ParamToShard]] = {}
    for item in params:
        kind = (item.param.dtype, item.param.requires_grad, item.param.is_meta)
        by_kind.setdefault(kind, []).append(item)
    unit_ref = weakref.ref(unit)

    def on_gradient() -> None:
        owner = unit_ref()
        if owner is not None:
            owner.on_gradient()

    groups = []
    for (_, _, on_meta), members in by_kind.items():
        groups.append(
            Group(
                members,
                axes,
                torch.device("meta") if on_meta else device,
                compute_dtype=unit.mp_policy.param_dtype,
                reduce_dtype=unit.mp_policy.reduce_dtype,
                on_gradient=on_gradient,
            )
        )
    return groups


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    for _, child in own_modules(modules):
        for buffer in child._buffers.values():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                buffer.data = buffer.to(device)
