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
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from vescale_fsdp.dbuffer import plain_tensors
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.granularity import (
    Granularity,
    GranularityPolicy,
    block_of,
    check_granularity,
)
from vescale_fsdp.engine.group import Group, ParamToShard
from vescale_fsdp.engine.methods import swap_class
from vescale_fsdp.engine.unit import Unit, unit_of
from vescale_fsdp.ragged import RaggedTensor

__all__ = ["fully_shard", "register_fsdp_forward_method"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_OWNED = "_vescale_fsdp_group_of"  # on an original parameter: a weak reference to its unit


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
        module: any module with a forward. Its class becomes ``FSDP<Class>``.
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
            list of modules and an int ``reshard_after_forward`` are not there yet.
        PlanError: the parameters cannot be laid out.

    Source: the signature is FSDP2's, then ours; arXiv 2602.22437 for the engine.
    """
    _check_module(module)
    _check_arguments(
        reshard_after_forward, shard_placement_fn, offload_policy, dp_mesh_dims, granularity
    )
    _check_engine_arguments(mp_policy, unused, in_flight)
    mesh = _default_mesh() if mesh is None else mesh
    _check_mesh(mesh)
    device = _device(mesh)
    params = _params_to_shard(module, set(ignored_params or ()), granularity)
    _move_buffers(module, device)
    unit = Unit(module, mp_policy, _as_bool(reshard_after_forward), unused, in_flight)
    with plain_tensors():
        unit.groups = _make_groups(unit, params, Axes.of(mesh), device)
    _register_hooks(module)
    swap_class(module)
    for below in module.modules():  # what Dynamo looks for
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
            args, kwargs = unit.pre_forward(args, kwargs)
            if function is method:
                output = function(*args, **kwargs)
            else:
                output = function(owner, *args, **kwargs)
        finally:
            output = unit.post_forward(output)
        return output

    module.__dict__[method_name] = wrapped


def _check_module(module: object) -> None:
    if isinstance(module, list):
        raise NotImplementedError(
            "fully_shard with a list of modules is not there yet; call it on each module"
        )
    if not isinstance(module, nn.Module):
        raise ValueError(f"fully_shard expects a module, got {type(module).__name__}")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and (
        type(module).forward in (nn.ModuleList.forward, nn.ModuleDict.forward)
    ):
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: {module}"
        )
    if unit_of(module) is not None:
        raise AssertionError(
            "Each distinct composable distributed API can only be applied to a module once. "
            f"fully_shard has already been applied to this module:\n{module}"
        )


def _check_arguments(
    reshard_after_forward: object,
    shard_placement_fn: object,
    offload_policy: object,
    dp_mesh_dims: object,
    granularity: object,
) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool | int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {reshard_after_forward}"
        )
    not_yet = {
        "reshard_after_forward as an int": (
            isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool)
        ),
        "shard_placement_fn": shard_placement_fn is not None,
        "offload_policy=CPUOffloadPolicy": isinstance(offload_policy, CPUOffloadPolicy),
        "dp_mesh_dims": dp_mesh_dims is not None,
    }
    for name, given in not_yet.items():
        if given:
            raise NotImplementedError(f"fully_shard: {name} is not there yet in vescale_fsdp")
    check_granularity(granularity)


def _check_engine_arguments(mp_policy: object, unused: object, in_flight: object) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"fully_shard: mp_policy must be a MixedPrecisionPolicy, got {mp_policy!r}; for one "
            "dtype write MixedPrecisionPolicy(param_dtype=...)"
        )
    if unused not in ("auto", "exchange", "zeros"):
        raise ValueError(
            f"fully_shard: unused must be 'auto', 'exchange' or 'zeros', got {unused!r}"
        )
    if not isinstance(in_flight, int) or isinstance(in_flight, bool) or in_flight < 1:
        raise ValueError(f"fully_shard: in_flight must be an int of at least 1, got {in_flight!r}")


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"fully_shard: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim > 2:
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard: rank {dist.get_rank()} is not part of {mesh}; pass a mesh that "
            "contains the rank that calls"
        )


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


def _params_to_shard(
    module: nn.Module,
    ignored: set[nn.Parameter],
    granularity: Granularity | GranularityPolicy | None,
) -> list[ParamToShard]:
    """The parameters no earlier call has taken, each once, with every place it is used at."""
    taken: dict[int, ParamToShard] = {}
    for prefix, child in _own_modules(module):
        for name, param in child._parameters.items():
            if param is None or param in ignored:
                continue
            site = (weakref.ref(child), name)
            if id(param) in taken:
                taken[id(param)].sites.append(site)
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            _check_param(fqn, param)
            block = block_of(granularity, fqn, param)
            taken[id(param)] = ParamToShard(fqn, param, [site], block)
    return list(taken.values())


def _own_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module and its descendants by name, in order, without those of nested units."""
    found: dict[int, tuple[str, nn.Module]] = {}
    _collect_own(module, "", found)
    return list(found.values())


def _collect_own(module: nn.Module, prefix: str, found: dict[int, tuple[str, nn.Module]]) -> None:
    # No function within the caller: its closure would be a cycle that keeps the modules alive.
    if id(module) in found or unit_of(module) is not None:
        return
    found[id(module)] = (prefix, module)
    for name, child in module.named_children():
        _collect_own(child, f"{prefix}.{name}" if prefix else name, found)


def _check_param(fqn: str, param: nn.Parameter) -> None:
    owner = getattr(param, _OWNED, None)
    if owner is not None and owner() is not None:
        raise ValueError(
            f"Parameter '{fqn}' is shared with a parameter already managed by another FSDP "
            "group. Tied parameters must be in one unit for now: do not call fully_shard on "
            "the inner module that holds one of them, so that the outer call takes both"
        )
    if isinstance(param, RaggedTensor):
        raise ValueError(
            f"fully_shard: parameter {fqn!r} is sharded already, by a call on a module around this "
            "one; call fully_shard on the inner modules first, and on the whole model last"
        )
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"fully_shard: parameter {fqn!r} is a DTensor on {param.device_mesh}; sharding "
            "tensor-parallel parameters further is not there yet in vescale_fsdp"
        )


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
        for item in members:
            setattr(item.param, _OWNED, unit_ref)
    return groups


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for _, child in _own_modules(module):
        for buffer in child._buffers.values():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                buffer.data = buffer.to(device)


def _register_hooks(module: nn.Module) -> None:
    """Hooks that find the unit through the module, and so keep neither alive."""

    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        unit = unit_of(module)
        assert unit is not None, "the hook is only on sharded modules"
        return unit.pre_forward(args, kwargs)

    def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
        unit = unit_of(module)
        assert unit is not None, "the hook is only on sharded modules"
        return unit.post_forward(output)

    def before_state_dict(module: nn.Module, *_: Any) -> None:
        unit = unit_of(module)
        if unit is not None:
            unit.reshard()

    def after_state_dict(module: nn.Module, state_dict: Any, *_: Any) -> None:
        unit = unit_of(module)
        if unit is not None and unit.pins:  # gathered: they must outlive the context
            unit.copy_gathered(state_dict)

    def before_load(module: nn.Module, *_: Any) -> None:
        unit = unit_of(module)
        if unit is not None:
            unit.refuse_if_pinned("load_state_dict")
            unit.reshard()

    def after_load(module: nn.Module, _: Any) -> None:
        unit = unit_of(module)
        if unit is not None and unit.is_sharded:
            for group in unit.groups:
                group.rebind()

    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(post_forward, always_call=True)
    module.register_state_dict_pre_hook(before_state_dict)
    module.register_state_dict_post_hook(after_state_dict)
    module.register_load_state_dict_pre_hook(before_load)
    module.register_load_state_dict_post_hook(after_load)
