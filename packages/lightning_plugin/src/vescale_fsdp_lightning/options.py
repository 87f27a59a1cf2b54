"""The arguments of the strategies: checks, and conversion to arguments of ``fully_shard``.

The strategies of Trainer and Fabric make the same frozen record. A wrong value raises before a
process is started, and the message names the accepted ones. `vescale_fsdp.options` makes objects of
the words and mappings of a yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_fsdp import (
    CPUOffloadPolicy,
    Granularity,
    MixedPrecisionPolicy,
    OffloadPolicy,
    QuantizedGather,
    QuantizedReduce,
    callable_units,
    repeated_blocks,
)
from vescale_fsdp.errors import companion
from vescale_fsdp.options import (
    ACTIVATIONS,
    BUDGET,
    COUNT,
    FLAG,
    GATHER,
    GRANULARITY,
    REDUCE,
    arguments,
    check,
    check_budget,
    one_of,
    only,
    option,
)

if TYPE_CHECKING:
    from vescale_fsdp_elastic import ElasticOptions

    Elasticity = ElasticOptions | dict[str, Any] | None
else:  # what LightningCLI parses; the package is loaded only if it is asked for
    Elasticity = dict[str, Any] | None

if TYPE_CHECKING or find_spec("vescale_fsdp_tune"):
    from vescale_fsdp_tune import Budget

    Memory = Budget | str | int | PathLike[str] | None
else:  # each value raises, with what to install
    Memory = str | int | PathLike[str] | None

__all__ = [
    "DATA",
    "TENSOR",
    "Classes",
    "Gather",
    "Options",
    "Reduce",
    "Wrap",
    "data_mesh",
    "elastic_options",
    "find_modules",
    "refuse_others",
    "timeout_of",
]

DATA, TENSOR = "data_parallel", "tensor_parallel"  # Lightning's names for axes of a mesh
REPLICATE, SHARD = "replicate", "shard"

Classes = Sequence[str | type[nn.Module]]
Wrap = str | Classes | Callable[[nn.Module], list[nn.Module]]
Gather = QuantizedGather | dict[str, Any] | str | None
Reduce = QuantizedReduce | dict[str, Any] | str | None
# What a budget chooses, or cannot have beside it.
_CHOSEN_BY_BUDGET = (
    "wrap",
    "reshard_after_forward",
    "tensor_parallel_size",
    "expert_parallel_size",
    "cpu_offload",
    "offload",
    "activation_checkpointing",
    "activations",
    "in_flight",
    "gather_codec",
    "reduce_codec",
)
_BOOL = "True or False"

_IN_FLIGHT = "in_flight=, the number of units that may be unsharded at a time"
_IGNORED = "call vescale_fsdp.fully_shard(..., ignored_params=...) in configure_model"
# Arguments of Lightning's FSDPStrategy and ModelParallelStrategy: what is here in their place.
_OF_OTHERS = {
    "auto_wrap_policy": "wrap=, a list of classes or of their names, or a function from the model "
    "to modules; by default the model's repeated blocks are units",
    "sharding_strategy": "leave it out for FULL_SHARD; reshard_after_forward=False for "
    "SHARD_GRAD_OP; device_mesh=(replicas, shards) for HYBRID_SHARD",
    "mixed_precision": "precision= of the Trainer or of Fabric, or mp_policy=",
    "activation_checkpointing_policy": "activation_checkpointing=True for the units, or a list of "
    "classes or of their names",
    "ignored_modules": _IGNORED,
    "ignored_states": _IGNORED,
    "backward_prefetch": _IN_FLIGHT,
    "forward_prefetch": _IN_FLIGHT,
    "limit_all_gathers": _IN_FLIGHT,
    "use_orig_params": "leave it out: names and parameters are always the module's own",
    "data_parallel_size": "leave it out: all processes that tensor_parallel_size leaves; or "
    "device_mesh=(replicas, shards)",
    "save_distributed_checkpoint": 'state_dict_type="dcp" for torch\'s format, "full" for one file',
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The user's arguments. `vescale_fsdp_lightning.sharding.Sharding` documents them.

    Raises:
        ValueError: a value is not one of the accepted ones.
        TypeError: a value has a wrong type.
    """

    wrap: Wrap = option(
        only(lambda value: callable(value) or _are_classes(value), "blocks|none"),
        "blocks",
        '"blocks", "none", a list of classes or of their names, or a function from the model to a '
        "list of its modules",
    )
    granularity: Granularity | Callable[..., Granularity | None] | str | None = option(
        GRANULARITY,
        None,
        "a Granularity, a policy (name, parameter) -> Granularity | None, elements:256, rows:128, "
        "tile:32x32 or whole",
    )
    reshard_after_forward: bool | int | None = option(
        only(lambda value: isinstance(value, int)),
        None,
        "True, False, None, or the int of a group's size",
    )
    device_mesh: DeviceMesh | Sequence[int] | None = option(
        only(lambda value: isinstance(value, DeviceMesh) or _are_sizes(value)),
        None,
        "(replicas, shards) as two ints, a DeviceMesh with names, or None",
    )
    tensor_parallel_size: int = option(COUNT, 1, "an int of at least 1")
    expert_parallel_size: int = option(COUNT, 1, "an int of at least 1")
    mp_policy: MixedPrecisionPolicy | None = option(
        only(lambda value: isinstance(value, MixedPrecisionPolicy)),
        None,
        "a MixedPrecisionPolicy, or None to follow precision=",
    )
    cpu_offload: bool = option(FLAG, False, _BOOL)
    offload: str | None = option(
        one_of("optimizer", "parameters", "all"), None, '"optimizer", "parameters", "all", "None"'
    )
    activation_checkpointing: bool | Classes = option(
        only(lambda value: isinstance(value, bool) or _are_classes(value)),
        False,
        "True, False, or a list of classes or names",
    )
    activations: str | Callable[..., Any] | list[Any] | None = option(
        ACTIVATIONS,
        None,
        '"recompute", "offload", "recompute+offload", a policy, a list of operators, or None',
    )
    unused: Literal["auto", "zeros"] = option(one_of("auto", "zeros"), "auto", '"auto", "zeros"')
    in_flight: int = option(COUNT, 2, "an int of at least 1")
    broadcast_buffers: bool = option(FLAG, True, _BOOL)
    gather_codec: Gather = option(
        GATHER,
        None,
        'a QuantizedGather, "int8", "e4m3", a mapping of dtype and block such as {"dtype": '
        '"int8", "block": [32, 32]}, or None',
    )
    reduce_codec: Reduce = option(
        REDUCE,
        None,
        'a QuantizedReduce, "int8", a mapping of block and error_feedback such as {"block": 256, '
        '"error_feedback": True}, or None',
    )
    state_dict_type: str = option(
        one_of("sharded", "full", "dcp"), "sharded", '"sharded", "full", "dcp"'
    )
    async_save: bool = option(FLAG, False, _BOOL)
    save_rng: bool = option(FLAG, True, _BOOL)
    weights_only: bool = option(FLAG, True, _BOOL)
    staging_dir: str | None = option(
        only(lambda value: isinstance(value, str)), None, "the path of a folder, or None"
    )
    budget: Memory = option(
        BUDGET,
        None,
        'a size such as "10GiB" or "80%", "auto", a number of bytes, the path of a written '
        "choice.yaml, a Budget, or None",
    )
    elastic: ElasticOptions | None = None

    def __post_init__(self) -> None:
        check(
            self,
            "VeScaleFSDPStrategy({name}={value!r}) does not work{reason}; accepted are {accepted}",
        )
        check_budget(
            self,
            _CHOSEN_BY_BUDGET,
            "VeScaleFSDPStrategy(budget={budget!r}, {name}={value!r}): the budget chooses {name}; "
            "use one of them",
        )
        if self.offload is not None and self.cpu_offload:
            raise ValueError(
                f"VeScaleFSDPStrategy(offload={self.offload!r}, cpu_offload=True): the optimizer "
                "steps on the CPU with cpu_offload, and with offload on the device; use one of them"
            )
        if self.activations is not None and self.activation_checkpointing:
            raise ValueError(
                f"VeScaleFSDPStrategy(activations={self.activations!r}, activation_checkpointing="
                f"{self.activation_checkpointing!r}): both say what is recomputed; use one of them"
            )
        mesh = self.device_mesh
        if isinstance(mesh, DeviceMesh):
            _check_names(mesh)
        if isinstance(mesh, DeviceMesh) and self.tensor_parallel_size > 1:
            raise ValueError(
                f"VeScaleFSDPStrategy(device_mesh=DeviceMesh(...), tensor_parallel_size="
                f"{self.tensor_parallel_size}): a DeviceMesh already has the size of its axis "
                f"{TENSOR!r}; leave tensor_parallel_size out"
            )
        if self.expert_parallel_size > 1 and self.expert_parallel_size % self.tensor_parallel_size:
            raise ValueError(
                f"VeScaleFSDPStrategy(expert_parallel_size={self.expert_parallel_size}) must be a "
                f"multiple of tensor_parallel_size={self.tensor_parallel_size}"
            )
        self._check_elastic()
        if self.async_save and self.state_dict_type != "sharded":
            raise ValueError(
                f"VeScaleFSDPStrategy(async_save=True, state_dict_type={self.state_dict_type!r}): "
                'only "sharded" is saved in the background'
            )

    def _check_elastic(self) -> None:
        if self.elastic is None:
            return
        for name in ("tensor_parallel_size", "expert_parallel_size"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"VeScaleFSDPStrategy(elastic=..., {name}={getattr(self, name)}): with elastic "
                    f"training all ranks are data-parallel ranks; leave {name} out"
                )
        if self.device_mesh is not None and not isinstance(self.device_mesh, DeviceMesh):
            raise ValueError(
                f"VeScaleFSDPStrategy(elastic=..., device_mesh={self.device_mesh!r}): sizes fix "
                "the number of ranks, which changes with elastic training; leave device_mesh out"
            )

    # Conversion

    def modules_to_wrap(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that become units, inner ones first, without the root."""
        if self.wrap == "none":
            return []
        if self.wrap == "blocks":
            return repeated_blocks(module)
        if callable(self.wrap):
            return callable_units(module, self.wrap(module))
        assert not isinstance(self.wrap, str), "checked"
        return callable_units(module, find_modules(module, self.wrap, "wrap"))

    def modules_to_checkpoint(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules whose activations are recomputed in backward."""
        wanted = self.activation_checkpointing
        if isinstance(wanted, bool):
            return self.modules_to_wrap(module) if wanted else []
        return find_modules(module, wanted, "activation_checkpointing")

    def engine_options(self) -> dict[str, Any]:
        """Return the arguments of ``fully_shard`` that are the same for all units."""
        return arguments(
            self,
            "granularity",
            "reshard_after_forward",
            "unused",
            "in_flight",
            "gather_codec",
            "reduce_codec",
        )

    def budget_for(self, module: nn.Module) -> Budget | None:
        """Return the budget with what is known of the model's step, or None.

        A ``LightningModule`` has ``example_input_array``, and the number of its trainer's
        micro-batches. What the user has set in a `Budget` remains.
        """
        if self.budget is None:
            return None
        budget = Budget.of(self.budget)
        if isinstance(self.budget, Budget):
            inputs = budget.inputs
            return budget if inputs is not None else replace(budget, inputs=_example(module))
        trainer = getattr(module, "_trainer", None)
        micro_batches = getattr(trainer, "accumulate_grad_batches", 1)
        return replace(budget, inputs=_example(module), micro_batches=micro_batches)

    @property
    def offloads_parameters(self) -> bool:
        """Whether shards and gradients stay in host memory."""
        return self.cpu_offload or self.offload in ("parameters", "all")

    def offload_policy(self, device_type: str) -> OffloadPolicy:
        """Return the offload policy. It pins memory unless the device is the CPU."""
        if not self.offloads_parameters:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=device_type != "cpu")

    def make_mesh(self, device_type: str, world_size: int) -> DeviceMesh:
        """Make the mesh of all processes. Collective.

        Axes are (``replicate``, ``shard``) or ``data_parallel``, then ``tensor_parallel``. The
        last is left out if it has one rank and the user has not asked for it, or for experts.

        Raises:
            ValueError: the product of its sizes is not ``world_size``.
        """
        mesh, tensor = self.device_mesh, self.tensor_parallel_size
        if isinstance(mesh, DeviceMesh):
            return mesh
        sizes = [world_size // tensor] if mesh is None else list(mesh)
        names = [DATA] if mesh is None else [REPLICATE, SHARD]
        if tensor > 1 or self.expert_parallel_size > 1:
            sizes, names = [*sizes, tensor], [*names, TENSOR]
        product = 1
        for size in sizes:
            product *= size
        if product != world_size:
            raise ValueError(
                f"VeScaleFSDPStrategy(device_mesh={mesh!r}, tensor_parallel_size={tensor}) is for "
                f"{product} processes, and there are {world_size} (devices times num_nodes)"
            )
        return init_device_mesh(device_type, tuple(sizes), mesh_dim_names=tuple(names))


def refuse_others(strategy: str, others: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that the strategy does not have."""
    known = [name for name in others if name in _OF_OTHERS]
    if known:
        instead = "; ".join(f"{name}: {_OF_OTHERS[name]}" for name in known)
        raise TypeError(
            f"{strategy} has no {', '.join(known)}, which Lightning's own strategies have. "
            f"Here instead of {instead}"
        )
    if others:
        raise TypeError(f"{strategy} got an unexpected keyword argument {next(iter(others))!r}")


def timeout_of(value: Any) -> timedelta | None:
    """Parse a timeout. A number counts seconds.

    Raises:
        ValueError: it is not a time, or not positive.
    """
    if value is None or (isinstance(value, timedelta) and value > timedelta(0)):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return timedelta(seconds=value)
    raise ValueError(
        f"VeScaleFSDPStrategy(timeout={value!r}) does not work; accepted are a number of seconds, "
        "a timedelta (in yaml 0:30:00), both above 0, or None for the process group's own"
    )


def elastic_options(value: Elasticity) -> ElasticOptions | None:
    """Return the options of an elastic training, if it is asked for.

    Raises:
        ImportError: the package for it is not installed.
        ValueError: see `ElasticOptions`.
    """
    if value is None:
        return None
    asks = "VeScaleFSDPStrategy(elastic=...)"
    companion("vescale_fsdp_elastic", asks, "vescale-fsdp-lightning[elastic]")
    from vescale_fsdp_elastic import ElasticOptions

    return ElasticOptions.of(value)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes of a mesh over which data and parameters are sharded, as a submesh."""
    names = mesh.mesh_dim_names
    if names is None or TENSOR not in names:
        return mesh
    data = tuple(name for name in names if name != TENSOR)
    return mesh[data[0]] if len(data) == 1 else mesh[data]


def find_modules(module: nn.Module, classes: Classes, argument: str) -> list[nn.Module]:
    """Return the modules of some classes, inner ones first.

    Raises:
        ValueError: the model has no module of a class. Names the classes that it has.
    """
    found: list[nn.Module] = []
    for wanted in classes:
        members = [
            child
            for child in module.modules()
            if child is not module
            and (
                type(child).__name__ == wanted if isinstance(wanted, str) else type(child) is wanted
            )
        ]
        if not members:
            there = sorted({type(child).__name__ for child in module.modules()} - {"ModuleList"})
            name = wanted if isinstance(wanted, str) else wanted.__name__
            raise ValueError(
                f"VeScaleFSDPStrategy({argument}=[{name!r}]): the model has no such module; "
                f"accepted are {', '.join(there)}"
            )
        found += members
    wanted_ids = {id(child) for child in found}
    return [child for child in reversed(list(module.modules())) if id(child) in wanted_ids]


def _example(module: nn.Module) -> Any:
    example = getattr(module, "example_input_array", None)
    return example if isinstance(example, torch.Tensor | tuple | dict) else None


def _are_classes(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset) or not value:
        return False
    return all(
        isinstance(each, str) or (isinstance(each, type) and issubclass(each, nn.Module))
        for each in value
    )


def _are_sizes(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        return False
    return all(type(each) is int and each >= 1 for each in value)


def _check_names(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    data = [name for name in names if name != TENSOR]
    if mesh.ndim > 1 and (not names or not 1 <= len(data) <= 2):
        raise ValueError(
            f"VeScaleFSDPStrategy(device_mesh={mesh}): its axes must have names: one to shard "
            f"over, or one that replicates and one that shards, and {TENSOR!r} if there is tensor "
            "parallelism"
        )
