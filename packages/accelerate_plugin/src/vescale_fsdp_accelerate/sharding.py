"""Shards a model with the options of the plug-in."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from vescale_fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    RaggedTensor,
    callable_units,
    combine,
    fully_shard,
    late_modules,
    refuse_other_engines,
    repeated_blocks,
)
from vescale_fsdp.options import arguments
from vescale_fsdp.ranks import everyone
from vescale_fsdp_accelerate.plans import Meshes, Plans
from vescale_fsdp_accelerate.plugin import VeScaleFSDPPlugin

if TYPE_CHECKING:
    from vescale_fsdp_tune import Budget

__all__ = ["Sharder", "units_of"]

_log = logging.getLogger(__name__)


def units_of(model: nn.Module) -> list[FSDPModule]:
    """Return the units of a model, also the model itself."""
    return [each for each in model.modules() if isinstance(each, FSDPModule)]


class Sharder:
    """Shards models over the mesh of all processes.

    Args:
        device: the device of this process.
        data: (replicas, shards) or (shards,). None: made for the first model, which is collective.
        tensor: of tensor parallelism.
    """

    def __init__(
        self,
        plugin: VeScaleFSDPPlugin,
        device: torch.device,
        data: DeviceMesh | None = None,
        tensor: DeviceMesh | None = None,
    ) -> None:
        self.plugin, self.device = plugin, device
        self._data, self._tensor = data, tensor
        if plugin.cpu_ram_efficient_loading and not plugin.sync_init:
            raise ValueError(
                "fsdp_vescale_sync_init: false has every process keep its own values, and with "
                "fsdp_cpu_ram_efficient_loading: true only the first has any; set one of them"
            )

    @cached_property
    def meshes(self) -> Meshes:
        """The meshes of all processes. Collective at the first call."""
        data = self._data
        if data is None:
            world_size, replicas = dist.get_world_size(), self.plugin.replicas
            if world_size % replicas:
                raise ValueError(
                    f"fsdp_vescale_replicas: {replicas} does not divide the {world_size} processes"
                )
            sizes: tuple[int, ...] = (world_size,)
            names: tuple[str, ...] = ("shard",)
            if replicas > 1:
                sizes, names = (replicas, world_size // replicas), ("replicate", "shard")
            data = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        return Meshes.of(data, self._tensor, self.plugin.ep_size)

    def shard(
        self,
        model: nn.Module,
        needs: Iterable[Any] = (),
        budget: Budget | None = None,
    ) -> Iterator[None]:
        """Make the units of a model, inner ones first. Yields after each. Collective.

        Args:
            needs: granularities that optimizers need.
            budget: chooses the settings. It yields once.

        Raises:
            TypeError: one of torch's own engines has sharded a part of it.
            ValueError: a class to wrap is not in it; or it has no plan for tensor or expert
                parallelism.
        """
        refuse_other_engines(model, "or leave it to accelerator.prepare")
        plugin, meshes = self.plugin, self.meshes
        parts_are_units = bool(units_of(model)) or bool(_sharded_in(model))
        plans = None
        if not parts_are_units:
            meshes.check(model)
            plans = Plans(model, meshes)
        if plugin.mixed_precision_policy is not None:
            upcast(model)
        ignored = self._ignored(model)
        if budget is not None:
            self._sync(model, model, ignored)
            self._shard_within(model, budget, ignored, needs)
            yield
            return
        if parts_are_units:  # an adapter in a part, for example, with a module around both
            yield from self.shard_late(model, needs)
        common = self._common(ignored, needs)
        blocks = [] if parts_are_units else self.blocks(model)
        kept = {"activations": self._activations()}
        policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
        for module in [*blocks, *([] if isinstance(model, FSDPModule) else [model])]:
            self._sync(module, model, ignored)
            if plans is not None:
                plans.apply(module)
            inner = meshes.experts_in(module)
            for each in [*inner, module]:
                if isinstance(each, FSDPModule):
                    continue
                own = policy
                if each is model and policy.param_dtype is not None and policy.output_dtype is None:
                    # Under mixed precision Accelerate guarantees that a model returns fp32.
                    own = replace(policy, output_dtype=torch.float32)
                is_of_experts = any(each is expert for expert in inner)
                mesh = meshes.expert_data if is_of_experts else meshes.data
                keeps = {} if is_of_experts or (blocks and each is model) else kept
                unit: Any = fully_shard(each, mesh=mesh, mp_policy=own, **common, **keeps)
                if is_of_experts:
                    # An expert's gradient is a sum over the tokens of all batches.
                    unit.set_gradient_divide_factor(meshes.num_batches)
                yield

    def shard_late(self, model: nn.Module, needs: Iterable[Any] = ()) -> Iterator[None]:
        """Shard the modules that were added to a sharded model. Yields after each unit. Collective.

        For example another adapter, or a new head for a second training.

        Raises:
            ValueError: a parameter was added to a module that is sharded already.
        """
        ignored = self._ignored(model)
        policy = self.plugin.mixed_precision_policy or MixedPrecisionPolicy()
        for modules in late_modules(model):
            for module in modules:
                if self.plugin.mixed_precision_policy is not None:
                    upcast(module)
                self._sync(module, model, ignored)
            common = self._common(ignored, needs)
            fully_shard(modules, mesh=self.meshes.data, mp_policy=policy, **common)
            yield

    def _common(self, ignored: set[nn.Parameter], needs: Iterable[Any]) -> dict[str, Any]:
        """Return the arguments of ``fully_shard`` that all units have."""
        plugin = self.plugin
        return {
            "offload_policy": self._offload_policy(),
            "ignored_params": ignored,
            "granularity": self._granularity(needs),
            **self._codecs(),
            "unused": plugin.unused,
            "in_flight": plugin.in_flight,
            "sharding": plugin.sharding,
            "accumulate": plugin.accumulate,
            "reshard_after_forward": None if plugin.reshard_after_forward else False,
        }

    def _shard_within(
        self,
        model: nn.Module,
        budget: Budget,
        ignored: set[nn.Parameter],
        needs: Iterable[Any],
    ) -> None:
        """Shard a model with the settings that a budget chooses.

        Raises:
            ValueError: keys of Accelerate contradict it.
        """
        plugin = self.plugin
        if isinstance(model, FSDPModule):
            return
        said = {
            "fsdp_auto_wrap_policy": not plugin.wraps_blocks,
            "fsdp_activation_checkpointing: true": plugin.activation_checkpointing,
            "fsdp_offload_params: true": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "fsdp_reshard_after_forward: false": not plugin.reshard_after_forward,
        }
        for key, is_there in said.items():
            if is_there:
                raise ValueError(
                    f"fsdp_vescale_budget: {plugin.budget!r} chooses what {key} says; leave one of "
                    "them out"
                )
        policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
        own = policy
        if policy.param_dtype is not None and policy.output_dtype is None:
            own = replace(policy, output_dtype=torch.float32)
        import vescale_fsdp_tune

        vescale_fsdp_tune.fully_shard(
            model,
            mesh=self.meshes.data,
            mp_policy=own,
            ignored_params=ignored,
            granularity=self._granularity(needs),
            unused=plugin.unused,  # type: ignore[arg-type]  # checked
            budget=replace(budget, unit_mp_policy=policy),
        )

    def _activations(self) -> Any:
        """Return what Accelerate's keys and ours say about activations.

        Raises:
            ValueError: they say different things.
        """
        plugin, ours = self.plugin, self.plugin.activations
        if not plugin.activation_checkpointing:
            return ours
        theirs = "recompute+offload" if plugin.activation_checkpointing_offload else "recompute"
        if ours not in (None, theirs):
            raise ValueError(
                f"fsdp_vescale_activations: {ours!r} and fsdp_activation_checkpointing, which "
                f"asks for {theirs!r}, say different things; leave one of them out"
            )
        return theirs

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that become units, inner ones first, without the root.

        Raises:
            ValueError: a class to wrap is not in the model. Names the classes that are.
        """
        return callable_units(model, self._wanted_blocks(model))

    def _wanted_blocks(self, model: nn.Module) -> list[nn.Module]:
        plugin = self.plugin
        if plugin.wraps_blocks:
            return repeated_blocks(model)
        policy = plugin.auto_wrap_policy
        if policy is None:
            return []
        name = getattr(getattr(policy, "func", policy), "__name__", "")
        inner = [each for each in reversed(list(model.modules())) if each is not model]
        inner = [each for each in inner if not isinstance(each, nn.ModuleList | nn.ModuleDict)]
        if name == "size_based_auto_wrap_policy":
            least = plugin.min_num_params or 0
            return [e for e in inner if sum(p.numel() for p in e.parameters()) > least]
        if name != "transformer_auto_wrap_policy":
            return [each for each in inner if policy(each)]
        names = plugin.transformer_cls_names_to_wrap
        if not names or names == ["None"]:
            return repeated_blocks(model)
        there = {type(each).__name__ for each in inner}
        missing = sorted(set(names) - there)
        if missing:
            raise ValueError(
                f"fsdp_transformer_layer_cls_to_wrap: the model has no {', '.join(missing)}; it "
                f"has {', '.join(sorted(there))}"
            )
        return [each for each in inner if type(each).__name__ in names]

    def _offload_policy(self) -> OffloadPolicy:
        policy: OffloadPolicy = self.plugin.cpu_offload
        if self.plugin.offload is not None and isinstance(policy, CPUOffloadPolicy):
            raise ValueError(
                f"fsdp_vescale_offload: {self.plugin.offload!r} and fsdp_offload_params: with the "
                "first, the optimizer steps on the device, with the second on the CPU; use one"
            )
        if self.plugin.offload in ("parameters", "all"):
            policy = CPUOffloadPolicy()
        if isinstance(policy, CPUOffloadPolicy) and self.device.type == "cpu":
            return CPUOffloadPolicy(pin_memory=False)  # nothing is copied to another device
        return policy

    def _granularity(self, needs: Iterable[Any]) -> Any:
        given = arguments(self.plugin, "granularity")["granularity"]
        parts: list[Any] = [] if given is None else [given]
        parts += list(needs)
        if parts:  # without other parts, fully_shard itself keeps blocks of codes whole
            parts += [each.granularity() for each in self._codecs().values() if each is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        return combine(*parts)

    def _codecs(self) -> dict[str, Any]:
        return arguments(self.plugin, "gather_codec", "reduce_codec")

    def _ignored(self, model: nn.Module) -> set[nn.Parameter]:
        wanted = self.plugin.ignored_modules
        if wanted is None:
            return set()
        if isinstance(wanted, str):
            pattern = re.compile(wanted)
            wanted = [each for name, each in model.named_modules() if pattern.fullmatch(name)]
        modules = list(wanted)
        for each in modules:
            each._apply(lambda t: t if t.is_meta else t.to(self.device))
        return {param for each in modules for param in each.parameters()}

    def _sync(self, module: nn.Module, model: nn.Module, ignored: set[nn.Parameter]) -> None:
        """Broadcast the first process' values of a module that becomes a unit. Collective.

        With ``cpu_ram_efficient_loading`` only the first process has loaded the model. The others
        get all values here, one unit at a time, and also those of ignored modules.
        """
        if not self.plugin.sync_init or dist.get_world_size() == 1:
            return
        left_alone = {
            id(p) for unit in units_of(module) for p in cast(nn.Module, unit).parameters()
        }
        left_alone |= {id(param) for param in _sharded_in(module)}
        if not self.plugin.cpu_ram_efficient_loading:
            left_alone |= {id(param) for param in ignored}
        tensors = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in left_alone]
        # If the model is on the meta device in the first process too, there are no values to send.
        flags = everyone().from_first(
            "the broadcast of a model", lambda: [tensor.is_meta for tensor in tensors]
        )
        made: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for tensor, first_lacks in zip(tensors, flags, strict=True):
                if first_lacks:
                    continue
                if tensor.is_meta:
                    made[id(tensor)] = _with_memory(tensor, self.device)
                self._broadcast(made.get(id(tensor), tensor))
        if made:
            ignored |= {made[id(p)] for p in ignored if id(p) in made}  # type: ignore[misc]
            _put_in_place(model, made)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):  # parallelized by the script: each process has its part
            local, mesh = tensor.to_local(), self.meshes.data_of(tensor)
            for axis in range(mesh.ndim):
                dist.broadcast(local, group=mesh.get_group(axis), group_src=0)
            return
        here = tensor.to(self.device).contiguous()
        dist.broadcast(here, src=0)
        if here.data_ptr() != tensor.data_ptr():
            tensor.data = here


def _sharded_in(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that were sharded before, in another model perhaps."""
    return [param for param in model.parameters() if isinstance(param, RaggedTensor)]


def _with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make an uninitialized tensor on ``device`` for a tensor on the meta device."""
    new = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    new.__dict__.update(tensor.__dict__)
    return new


def _put_in_place(model: nn.Module, made: dict[int, torch.Tensor]) -> None:
    """Replace parameters and buffers everywhere in the model."""
    for module in model.modules():
        slots: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slot in slots:
            slot.update({name: made[id(t)] for name, t in slot.items() if id(t) in made})


def upcast(model: nn.Module) -> None:
    """Convert trainable parameters to fp32 under mixed precision, and log it."""
    found = []
    for name, param in model.named_parameters():
        if param.requires_grad and param.is_floating_point() and param.dtype.itemsize < 4:
            found.append(name)
            param.data = param.data.float()
    if found and dist.get_rank() == 0:
        shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        _log.warning(
            "mixed precision: %d trainable parameters (%s) were in 16 bits and are now kept, and "
            "optimized, in fp32; checkpoints will be in fp32. Set mixed_precision: no to train in "
            "the dtype of the model",
            len(found),
            shown,
        )


def weak_parameters(model: nn.Module) -> dict[str, Any]:
    """Return weak references to the parameters by name. Tied ones have several names."""
    return {name: weakref.ref(p) for name, p in model.named_parameters(remove_duplicate=False)}
