"""Tensor and expert parallelism: which mesh each has, and the plans of ``transformers`` models.

Eight processes with ``tp_size: 2``, ``dp_shard_size: 4`` and ``ep_size: 4``. Processes that are
tensor parallel get the same batch. Experts are on a second mesh of the same processes::

    process         0     1     2     3     4     5     6     7
    data            [ batch 0 ] [ batch 1 ] [ batch 2 ] [ batch 3 ]     sharded over these 4
    tp              0     1     0     1     0     1     0     1         sharded by the plan
    ep              0     1     2     3     0     1     2     3         each has a quarter of them
    efsdp           0     0     0     0     1     1     1     1         sharded over these 2

A model of ``transformers`` has a plan for each: which parameters are sharded along which dimension,
and what is sent around a layer's forward. Other models are parallelized by the script, before
``prepare``, over the same meshes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

__all__ = ["Meshes", "Plans", "check_sizes"]

TENSOR, EXPERTS, EXPERT_DATA, REPLICATE = "tp", "ep", "efsdp", "dp_replicate"
_NOT_SUPPORTED = {
    "cp": "context parallelism replaces attention by torch's ring attention, which this engine has "
    "not been run with",
    "sp": "Accelerate's sequence parallelism is DeepSpeed's, within its engine",
}


def check_sizes(config: Any, plugin: Any, num_processes: int) -> None:
    """Check the sizes of a ``ParallelismConfig`` (or None) and of the plug-in. No communication.

    Raises:
        ValueError: one is not supported, or does not divide what it must divide.
    """
    if config is not None and config.total_size > 1:
        _check_config(config)
    tensor = 1 if config is None else config.tp_size
    is_parallel = tensor > 1 or plugin.ep_size > 1
    if is_parallel and plugin.sharding == "hsdp_zero1":
        raise ValueError(
            "fsdp_vescale_sharding: hsdp_zero1 does not work with tensor or expert parallelism; "
            "use hsdp"
        )
    replicas = plugin.replicas
    if config is not None and config.total_size > 1:
        replicas = config.dp_replicate_size
    ranks_of_a_replica = num_processes // replicas
    if plugin.ep_size > 1 and (plugin.ep_size % tensor or ranks_of_a_replica % plugin.ep_size):
        raise ValueError(
            f"fsdp_vescale_ep_size: {plugin.ep_size} must be a multiple of tp_size ({tensor}) and "
            f"divide the {ranks_of_a_replica} processes of a replica (dp_shard_size times tp_size)"
        )


def _check_config(config: Any) -> None:
    for what, reason in _NOT_SUPPORTED.items():
        size = getattr(config, f"{what}_size")
        if size > 1:
            raise ValueError(
                f"parallelism_config: {what}_size={size} does not work with veScale-FSDP: {reason}."
                " dp_replicate_size, dp_shard_size and tp_size do, and fsdp_vescale_ep_size for "
                "experts"
            )
    if config.dp_shard_size == 1:
        raise ValueError(
            f"parallelism_config: dp_replicate_size={config.dp_replicate_size}, dp_shard_size=1, "
            f"tp_size={config.tp_size} leaves nothing to shard over; set dp_shard_size to at least "
            "2, and lower the others. To replicate the model, leave the parallelism config out and "
            "set fsdp_vescale_sharding: ddp"
        )


@dataclass(frozen=True)
class Meshes:
    """The meshes of the processes.

    Attributes:
        data: (replicas, shards) or (shards,), over which parameters are sharded.
        tensor: of the processes that get the same batch; None without tensor parallelism.
        experts: (``dp_replicate``, ``efsdp``, ``ep``) and a dim of size 1, or without the first;
            None without expert parallelism.
    """

    data: DeviceMesh
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @classmethod
    def of(cls, data: DeviceMesh, tensor: DeviceMesh | None, ep_size: int) -> Meshes:
        """Make the mesh of experts. Collective, if ``ep_size`` is larger than 1."""
        if ep_size == 1:
            return cls(data, tensor)
        replicas = data.size(0) if data.ndim == 2 else 1
        sizes = [dist.get_world_size() // replicas // ep_size, ep_size, 1]
        names = [EXPERT_DATA, EXPERTS, "one"]
        if replicas > 1:
            sizes, names = [replicas, *sizes], [REPLICATE, *names]
        made = init_device_mesh(data.device_type, tuple(sizes), mesh_dim_names=tuple(names))
        return cls(data, tensor, made)

    @property
    def num_batches(self) -> int:
        """The number of processes that get different batches."""
        return self.data.size()

    @property
    def expert_data(self) -> DeviceMesh:
        """Over which experts are sharded and replicated."""
        assert self.experts is not None, "there is a mesh of experts"
        if REPLICATE in (self.experts.mesh_dim_names or ()):
            return self.experts[REPLICATE, EXPERT_DATA]
        return self.experts[EXPERT_DATA]

    def data_of(self, param: DTensor) -> DeviceMesh:
        """Return the mesh over which the engine shards a parameter that is parallelized."""
        return self.expert_data if self.is_of_expert(param) else self.data

    def is_of_expert(self, param: object) -> bool:
        """Whether it is a DTensor over the mesh dim ``ep``."""
        names = param.device_mesh.mesh_dim_names if isinstance(param, DTensor) else ()
        return self.experts is not None and EXPERTS in (names or ())

    def experts_in(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that hold parameters over the mesh dim ``ep``, inner ones first.

        Raises:
            ValueError: one of them has other parameters too, which need another mesh.
        """
        found = []
        for name, each in reversed(list(module.named_modules())):
            own = list(each.parameters(recurse=False))
            if not any(self.is_of_expert(param) for param in own):
                continue
            if not all(self.is_of_expert(param) for param in each.parameters()):
                raise ValueError(
                    f"{name or type(module).__name__} has parameters of experts, on the mesh dim "
                    "'ep', and others; put the experts in a module of their own"
                )
            found.append(each)
        return found

    def check(self, model: nn.Module) -> None:
        """Raise if the script has parallelized a parameter over another mesh.

        Raises:
            ValueError: names the parameter.
        """
        accepted = [mesh for mesh in (self.tensor,) if mesh is not None]
        if self.experts is not None:
            accepted.append(self.experts[EXPERTS])
        for name, param in model.named_parameters():
            if isinstance(param, DTensor) and param.device_mesh not in accepted:
                raise ValueError(
                    f"{name} is a DTensor on {param.device_mesh}, which is no part of the "
                    "accelerator's meshes. Set parallelism_config's tp_size or "
                    "fsdp_vescale_ep_size, and shard it over accelerator.torch_device_mesh['tp'] "
                    "or accelerator.expert_mesh['ep']; or leave the model whole, and prepare "
                    "applies the plans of transformers"
                )


class Plans:
    """The plans of one model, applied to one part of it after the other.

    Args:
        model: whole: nothing of it is sharded yet. If it has been parallelized by the script, there
            is nothing to do.

    Raises:
        ValueError: the model has no plan, or a plan cannot be applied to it. No communication.
    """

    def __init__(self, model: nn.Module, meshes: Meshes) -> None:
        self._meshes = meshes
        self._steps: list[tuple[str, str, bool]] = []  # name, style, whether it is of experts
        done = [param for param in model.parameters() if isinstance(param, DTensor)]
        has_experts = any(meshes.is_of_expert(param) for param in done)
        needs_experts = meshes.experts is not None and not has_experts
        needs_tensor = meshes.tensor is not None and len(done) == 0
        expert_plan: dict[str, str] = {}
        if needs_experts:
            assert meshes.experts is not None, "just checked"
            expert_plan = _expanded(model, _plan_of(model, "ep", meshes.experts[EXPERTS].size()))
            _check_experts(model, expert_plan, meshes.experts[EXPERTS].size())
            self._steps += [(name, style, True) for name, style in expert_plan.items()]
        if needs_tensor:
            assert meshes.tensor is not None, "just checked"
            plan = _expanded(model, _plan_of(model, "tp", meshes.tensor.size()))
            plan = {name: style for name, style in plan.items() if not _is_in(name, expert_plan)}
            _check_tensor(model, plan, meshes.tensor.size())
            self._steps += [(name, style, False) for name, style in plan.items()]
        self._model = model
        self._applied: set[str] = set()
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id: before, after

    def apply(self, module: nn.Module) -> None:
        """Apply them to a module of the model. No communication: each process takes its part."""
        if not self._steps:
            return
        modules = dict(self._model.named_modules())
        inside = {id(each) for each in module.modules()}
        for name, style, is_of_expert in self._steps:
            is_module = name in modules
            owner = modules[name if is_module else name.rpartition(".")[0]]
            if name in self._applied or id(owner) not in inside:
                continue
            self._applied.add(name)
            attribute = "" if is_module else name.rpartition(".")[2]
            former = dict(owner._parameters)
            self._apply_one({name: style}, is_of_expert)
            for key, now in owner._parameters.items():
                was = former.get(key)
                if was is not None and now is not None and was is not now:
                    vars(now).update(vars(was))  # what users have set on it
            before, after = former.get(attribute), owner._parameters.get(attribute)
            if before is None or after is None or before is after:
                continue
            known = self._made.setdefault(id(before), (before, after))[1]
            owner._parameters[attribute] = known  # tied ones stay tied
        self._keep_ties(module)

    def _apply_one(self, plan: dict[str, str], is_of_expert: bool) -> None:
        meshes = self._meshes
        if is_of_expert:
            from transformers.distributed.expert_parallel import apply_expert_parallelism

            assert meshes.experts is not None, "there is a plan for experts"
            same_batch = meshes.experts["one"] if meshes.tensor is None else meshes.tensor
            apply_expert_parallelism(self._model, meshes.experts[EXPERTS], same_batch, plan)
        else:
            from transformers.distributed.tensor_parallel import apply_tensor_parallelism

            assert meshes.tensor is not None, "there is a plan for tensor parallelism"
            apply_tensor_parallelism(self._model, meshes.tensor, plan)

    def _keep_ties(self, module: nn.Module) -> None:
        """Put what a parameter has become wherever else it is."""
        for each in module.modules():
            for name, param in each._parameters.items():
                if param is not None and id(param) in self._made:
                    each._parameters[name] = self._made[id(param)][1]


def _plan_of(model: nn.Module, what: str, size: int) -> dict[str, str]:
    plan = getattr(model, f"{what}_plan", None)
    if not isinstance(plan, dict) or not plan:
        kind, argument, mesh = {
            "tp": ("tensor", "tp_size", "torch_device_mesh['tp']"),
            "ep": ("expert", "fsdp_vescale_ep_size", "expert_mesh['ep']"),
        }[what]
        raise ValueError(
            f"{argument}={size}: {type(model).__name__} has no plan for {kind} parallelism (models "
            f"of transformers have model.{what}_plan). Give it one, shard its layers over "
            f"accelerator.{mesh} before prepare, or leave the size out"
        )
    try:
        import transformers.distributed.expert_parallel  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{what}_size={size} needs transformers 5.21 or newer, whose plans can be applied; or "
            "shard the layers in the script, before prepare"
        ) from error
    return plan


def _expanded(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Return the style of each module and parameter that a plan with wildcards names.

    Parameters come before the module that holds them: a module's style reads their sizes.
    """
    found: dict[str, str] = {}
    for module_name, module in model.named_modules():
        of_module = plan.get(_generic(module_name))
        for name, _ in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            style = plan.get(_generic(full_name), of_module)
            if style is not None:
                found[full_name] = style
        if of_module is not None:
            found[module_name] = of_module
    return found


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _is_in(name: str, others: Iterable[str]) -> bool:
    """Whether a module or parameter is one of ``others`` or inside of one."""
    return any(name == other or name.startswith(f"{other}.") for other in others)


def _check_experts(model: nn.Module, plan: dict[str, str], size: int) -> None:
    if not plan:
        raise ValueError(
            f"fsdp_vescale_ep_size={size}: the plan of {type(model).__name__} names experts, and "
            "the model has none of them; leave the size out"
        )
    for name, param in model.named_parameters():
        if plan.get(name) == "grouped_gemm" and param.shape[0] % size:
            raise ValueError(
                f"fsdp_vescale_ep_size={size} does not divide the {param.shape[0]} experts of "
                f"{name}"
            )


def _check_tensor(model: nn.Module, plan: dict[str, str], size: int) -> None:
    packed = [name for name, style in plan.items() if style.startswith("packed_")]
    if packed:
        raise ValueError(
            f"tp_size={size}: the plan of {type(model).__name__} shards {packed[0]} in two halves "
            "(packed), which veScale-FSDP cannot shard further. If these are experts, set "
            f"fsdp_vescale_ep_size: {size}, which spreads them over the same processes; or take "
            "them out of model.tp_plan"
        )
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for attribute in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, attribute, None)
        if isinstance(heads, int) and heads % size and "colwise" in plan.values():
            raise ValueError(f"tp_size={size} does not divide {attribute}={heads} of the model")
