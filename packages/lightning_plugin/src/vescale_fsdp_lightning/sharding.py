"""What the strategies of Trainer and Fabric share: arguments, processes, and the sharded model."""

from __future__ import annotations

import atexit
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from inspect import getattr_static
from typing import Any, Literal, Never

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_fsdp import (
    FSDPModule,
    Granularity,
    MixedPrecisionPolicy,
    fully_shard,
    late_modules,
    materialize,
    refuse_other_engines,
    register_fsdp_forward_method,
)
from vescale_fsdp.checkpoint import full, init_process_group
from vescale_fsdp.optim import offload_, split_named_params
from vescale_fsdp.spi import backend_name, check_reduced
from vescale_fsdp_lightning.checkpoints import Checkpoints
from vescale_fsdp_lightning.experts import expert_data, expert_modules, make_expert_mesh
from vescale_fsdp_lightning.options import (
    Classes,
    Elasticity,
    Gather,
    Memory,
    Options,
    Reduce,
    Wrap,
    data_mesh,
    elastic_options,
    refuse_others,
    timeout_of,
)
from vescale_fsdp_lightning.precision import policy_for

__all__ = [
    "MakeOptimizer",
    "Sharding",
    "check_optimizers",
    "gradient_sync",
    "owns",
    "set_up_optimizers",
]

_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the modules of models that were sharded
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
DEFAULT_TIMEOUT = timedelta(minutes=30)


class Sharding:
    """Fully-sharded data parallel by veScale-FSDP: ``strategy="vescale_fsdp"``.

    By default the model's repeated blocks become units, sharded over all processes, in
    the dtypes of ``precision=``, and checkpoints are sharded and sealed.

    Args:
        wrap: which submodules become units: ``"blocks"`` (the model's repeated blocks), ``"none"``
            (one unit of all), a list of classes or of their names, or a function from the model to
            a list, inner modules first. Modules that the user has sharded do not change.
        granularity: the blocks that must not be split, as in ``vescale_fsdp.fully_shard``, or:
            ``"rows:32"``, ``"elements:256"``, ``"tile:32x32"``, ``"whole"``.
        reshard_after_forward: as of ``fully_shard``.
        device_mesh: ``(replicas, shards)``: shard over groups and replicate between them (HSDP); or
            a mesh with names, whose axis ``tensor_parallel``, if any, the user applies.
        tensor_parallel_size: processes that get the same data. ``configure_model`` shards layers
            over ``self.device_mesh["tensor_parallel"]``; the strategy shards over the other axes.
        expert_parallel_size: processes over which experts are spread; a multiple of
            ``tensor_parallel_size``. ``configure_model`` shards experts over
            ``self.trainer.strategy.expert_mesh["expert_parallel"]``.
        mp_policy: dtypes. Default: those of ``precision=``. ``bf16-mixed`` all-gathers and
            computes in bf16 and reduces gradients in fp32, under autocast; ``bf16-true`` and
            ``16-true`` keep everything in that dtype.
        cpu_offload: shards, gradients and optimizer state stay in host memory, and the optimizer
            steps on the CPU.
        offload: what stays in host memory while the optimizer steps on the device, part by part
            (`vescale_fsdp.optim.offload_`): ``"optimizer"`` (its states), ``"parameters"`` (and
            gradients), or ``"all"``.
        activation_checkpointing: recompute activations in backward: of the units, or of a list
            of classes or of their names.
        activations: as of ``fully_shard``, for the units: ``"recompute"``, ``"offload"`` (to host
            memory), ``"recompute+offload"``, or a policy of torch's selective checkpointing.
        unused: as of ``fully_shard``.
        in_flight: as of ``fully_shard``: how many units may be unsharded or prefetched at a time;
            an int of at least 1.
        broadcast_buffers: send the buffers of the first process, such as BatchNorm's
            statistics, to all before the first forward of a step, as ``DDPStrategy`` does. False:
            each keeps its own, and nothing is sent.
        gather_codec, reduce_codec: send weights, and gradients, in 8 bits: a ``QuantizedGather``
            and a ``QuantizedReduce``, or: ``"int8"``, ``"e4m3"`` (weights only),
            ``{"dtype": "int8", "block": (32, 32)}``, ``{"block": 256, "error_feedback": True}``.
        state_dict_type: the format of saves. ``"sharded"``: a sealed directory to which each
            process writes its part (`vescale_fsdp.checkpoint`); ``"full"``: one file, as of
            ``DDPStrategy``; ``"dcp"``: the directory that Lightning's consolidation tool reads.
            Each setting loads all three.
        async_save: sharded checkpoints are written in the background.
        save_rng: sharded checkpoints have the random number generators of all processes.
        weights_only: loading a file unpickles nothing but tensors and plain values. False for
            files that you trust: they can run code.
        budget: the memory of a process, as of ``vescale_fsdp_tune.fully_shard``: ``"10GiB"``,
            ``"80%"``, ``"auto"``, a written choice (``"choice.yaml"``) or a ``Budget``. It chooses
            units, stage, what is resharded and recomputed, and ``in_flight``: pass none of these.
            The inputs of a forward are the module's ``example_input_array``, or
            ``Budget(inputs=...)``.
        staging_dir: where a sharded checkpoint is made that goes to another file system, such as
            ``s3://``; all processes must share it. Default: the machine's folder for such files.
        elastic: `Trainer` only: the training continues when ranks come and go, under
            ``torchrun --nnodes 1:4 --max-restarts N``: an ``ElasticOptions``, or a mapping of its
            arguments. See the guide to elastic training.
        process_group_backend, timeout: of ``torch.distributed``; a number counts seconds.

    Raises:
        ValueError: a value that is none of the accepted ones, which the message has.
        TypeError: an unknown argument. For those of ``FSDPStrategy`` and ``ModelParallelStrategy``
            the message has what is here in their place.
    """

    namespace: str  # of the base class, such as "lightning.pytorch"
    is_distributed = True  # Lightning reads this of strategies that it does not know
    _device_mesh: DeviceMesh | None = None
    _expert_mesh: DeviceMesh | None = None
    _num_nodes = 1

    # Attributes of Lightning's base class
    accelerator: Any
    cluster_environment: Any
    parallel_devices: Any
    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int

    def __init__(
        self,
        *,
        wrap: Wrap = "blocks",
        granularity: Granularity | Callable[..., Granularity | None] | str | None = None,
        reshard_after_forward: bool | int | None = None,
        device_mesh: DeviceMesh | Sequence[int] | None = None,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        mp_policy: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        offload: Literal["optimizer", "parameters", "all"] | None = None,
        activation_checkpointing: bool | Classes = False,
        activations: str | Callable[..., Any] | list[Any] | None = None,
        unused: Literal["auto", "zeros"] = "auto",
        in_flight: int = 2,
        broadcast_buffers: bool = True,
        gather_codec: Gather = None,
        reduce_codec: Reduce = None,
        state_dict_type: Literal["sharded", "full", "dcp"] = "sharded",
        async_save: bool = False,
        save_rng: bool = True,
        weights_only: bool = True,
        staging_dir: str | None = None,
        budget: Memory = None,
        elastic: Elasticity = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        **others: Never,
    ) -> None:
        refuse_others(type(self).__name__, others)
        self.options = Options(
            wrap=wrap,
            granularity=granularity,
            reshard_after_forward=reshard_after_forward,
            device_mesh=device_mesh,
            tensor_parallel_size=tensor_parallel_size,
            expert_parallel_size=expert_parallel_size,
            mp_policy=mp_policy,
            cpu_offload=cpu_offload,
            offload=offload,
            activation_checkpointing=activation_checkpointing,
            activations=activations,
            unused=unused,
            in_flight=in_flight,
            broadcast_buffers=broadcast_buffers,
            gather_codec=gather_codec,
            reduce_codec=reduce_codec,
            state_dict_type=state_dict_type,
            async_save=async_save,
            save_rng=save_rng,
            weights_only=weights_only,
            staging_dir=staging_dir,
            budget=budget,
            elastic=elastic_options(elastic),
        )
        self._checkpoints = Checkpoints(self.options)
        self._to_save_too: dict[str, MakeOptimizer] = {}
        self._companions: dict[str, torch.optim.Optimizer] = {}
        super().__init__()
        self._process_group_backend, self._timeout = process_group_backend, timeout_of(timeout)

    # Processes: Lightning's strategies for several each implement these methods. Ours derive from
    # ``ParallelStrategy``, which does not, and not from one of these strategies: other programs
    # look for their classes and then do what only that strategy needs.

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all processes.

        Raises:
            RuntimeError: processes have not been started.
        """
        if self._device_mesh is None:
            raise RuntimeError(
                "strategy.device_mesh exists only after torch.distributed has been started: in "
                "configure_model and later, or after fabric.launch()"
            )
        return self._device_mesh

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = number

    @property
    def process_group_backend(self) -> str | None:
        """``"nccl"`` or ``"gloo"``. None: it follows from the device."""
        return self._process_group_backend

    # Starting

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            launchers = import_module(f"{self.namespace}.strategies.launchers.subprocess_script")
            self._launcher = launchers._SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def _setup_distributed(self) -> None:
        self.accelerator.setup_device(self.root_device)
        self._utilities("seed").reset_seed()
        self._set_world_ranks()
        tools = self._utilities("distributed")
        if self._process_group_backend is None:
            find = tools._get_default_process_group_backend_for_device
            self._process_group_backend = find(self.root_device)
        device = None if self.root_device.type == "cpu" else self.root_device
        options: dict[str, Any] = {"timeout": self._timeout, "device_id": device}
        if dist.is_torchelastic_launched() and not dist.is_initialized():
            self._init_process_group(self._process_group_backend, **options)
        tools._init_dist_connection(
            self.cluster_environment, self._process_group_backend, **options
        )

    def _init_process_group(self, backend: str | None, **options: Any) -> None:
        """Make the default group under torchrun, safe for restarts. Lightning then uses it."""
        init_process_group(backend, **options)

    def _set_world_ranks(self) -> None:
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _utilities(self, name: str) -> Any:
        """Return a module of Fabric, of the same namespace. It has the functions for processes."""
        is_one_package = self.namespace.startswith("lightning.")
        fabric = "lightning.fabric" if is_one_package else "lightning_fabric"
        return import_module(f"{fabric}.utilities.{name}")

    # Collectives on objects and metrics

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all processes."""
        if not dist.is_initialized():
            return
        is_nccl = backend_name(None, self.root_device) == "nccl"
        dist.barrier(device_ids=[self.root_device.index] if is_nccl else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one process to all."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, or another ``reduce_op``, over processes. Only tensors are reduced."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if isinstance(tensor, DTensor):  # computed from sharded parameters: a norm of gradients
            tensor = tensor.full_tensor()
        return self._utilities("distributed")._sync_ddp_if_available(
            tensor, group, reduce_op=reduce_op
        )

    # Mesh

    def _start_mesh(self) -> None:
        """Make the mesh, once, after ``torch.distributed`` was started."""
        if self._device_mesh is None:
            mesh = self.options.make_mesh(self.root_device.type, self.world_size)
            size = self.options.expert_parallel_size
            if size > 1:
                self._expert_mesh = make_expert_mesh(data_mesh(mesh), size, self.world_size)
            self._device_mesh = mesh
            # gloo sometimes aborts at exit if the process group is not destroyed before.
            atexit.unregister(_destroy_process_group)
            atexit.register(_destroy_process_group)

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The mesh of experts, with the axes ``expert_data`` and ``expert_parallel``.

        Raises:
            RuntimeError: processes have not been started, or there is no expert parallelism.
        """
        if self._expert_mesh is None:
            raise RuntimeError(
                "strategy.expert_mesh exists only with expert_parallel_size of at least 2 (got "
                f"{self.options.expert_parallel_size}), in configure_model and later, or after "
                "fabric.launch()"
            )
        return self._expert_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each process gets its own part of the data. Tensor-parallel processes get the same."""
        mesh = data_mesh(self.device_mesh)
        rank = 0
        for axis in range(mesh.ndim):
            rank = rank * mesh.size(axis) + mesh.get_local_rank(axis)
        return {"num_replicas": mesh.size(), "rank": rank}

    # Model

    def _shard(
        self, module: nn.Module, precision: str, *, methods: Iterable[str], roots: bool
    ) -> None:
        """Shard the model, or what the user has not sharded of it.

        Args:
            methods: names of the module's methods that count as forward.
            roots: the user calls submodules separately, with backwards in between.
        """
        refuse_other_engines(module, "or leave it to the strategy")
        if self.options.budget is None:
            self._shard_units(module, precision, roots=roots)
        else:
            self._shard_within(module, precision, roots=roots)
        check_reduced(module, "VeScaleFSDPStrategy")
        offloads = self.options.offloads_parameters or _is_offloaded(module)
        rests_on = torch.device("cpu") if offloads else self.root_device
        materialize(module, rests_on)
        for child in module.modules():  # for metrics, whose state is not parameters or buffers
            if next(child.parameters(), None) is None:
                child.to(self.root_device)
        _prepared.update(module.modules())
        for method in methods:
            if callable(getattr(module, method, None)) and method not in vars(module):
                register_fsdp_forward_method(module, method)

    def _shard_units(self, module: nn.Module, precision: str, *, roots: bool) -> None:
        options = self.options
        mesh = data_mesh(self.device_mesh)
        common = {
            **options.engine_options(),
            "offload_policy": options.offload_policy(self.root_device.type),
        }
        # Parts of a model that was trained before stay as they are: a backbone, a teacher.
        new = [child for child in module.modules() if child not in _prepared]
        is_users = module in _prepared or any(isinstance(child, FSDPModule) for child in new)
        self._recompute(module)
        blocks = [] if is_users else self._modules_to_shard(module, roots)
        blocks = [block for block in blocks if block not in _prepared]
        kept: dict[str, Any] = {"activations": options.activations}
        if not is_users:
            heads = self._travel_whole(module)
            policy = self._policy(precision, is_root=False)
            spread = expert_modules(module)
            if options.expert_parallel_size > 1 and not spread:
                raise ValueError(
                    f"VeScaleFSDPStrategy(expert_parallel_size={options.expert_parallel_size}): no "
                    "parameter is a DTensor over expert_mesh['expert_parallel']; shard the experts "
                    "over it in configure_model (with Fabric before setup), or leave the size out"
                )
            for experts in (each for each in spread if each not in _prepared):
                of_experts = expert_data(self.expert_mesh)
                unit: Any = fully_shard(experts, mesh=of_experts, mp_policy=policy, **common)
                # An expert's gradient is a sum over the tokens of all batches.
                unit.set_gradient_divide_factor(mesh.size())
            for block in blocks:
                if not isinstance(block, FSDPModule):  # the user may wrap experts, too
                    arguments = common | kept | heads.get(id(block), {})
                    fully_shard(block, mesh=mesh, mp_policy=policy, **arguments)
        if is_users:  # an adapter in a part of an earlier stage, for example
            self._shard_late(module, precision)
        if not isinstance(module, FSDPModule):
            policy = self._policy(precision, is_root=True)
            own = {"broadcast_buffers": options.broadcast_buffers, **({} if blocks else kept)}
            fully_shard(module, mesh=mesh, mp_policy=policy, **own, **common)

    def _shard_late(self, module: nn.Module, precision: str) -> None:
        """Shard the modules that were added to a sharded model: a new head, another adapter.

        Raises:
            ValueError: a parameter was added to a module that is sharded already.
        """
        common = {
            **self.options.engine_options(),
            "offload_policy": self.options.offload_policy(self.root_device.type),
        }
        policy = self._policy(precision, is_root=False)
        for modules in late_modules(module):
            fully_shard(modules, mesh=data_mesh(self.device_mesh), mp_policy=policy, **common)

    def _shard_within(self, module: nn.Module, precision: str, *, roots: bool) -> None:
        """Shard the model with the settings that its budget chooses.

        Raises:
            ValueError: the user calls submodules separately, or has sharded some.
        """
        if roots:
            raise ValueError(
                "VeScaleFSDPStrategy(budget=...) is for automatic optimization: with manual "
                "optimization each child of the module is a unit; leave budget out"
            )
        if isinstance(module, FSDPModule):  # an earlier stage of a trainer has done it
            self._shard_late(module, precision)
            return
        options = self.options
        budget = options.budget_for(module)
        assert budget is not None, "the caller has asked"
        import vescale_fsdp_tune

        vescale_fsdp_tune.fully_shard(
            module,
            mesh=data_mesh(self.device_mesh),
            mp_policy=self._policy(precision, is_root=True),
            granularity=options.engine_options()["granularity"],
            unused=options.unused,
            broadcast_buffers=options.broadcast_buffers,
            budget=replace(budget, unit_mp_policy=self._policy(precision, is_root=False)),
        )

    def _modules_to_shard(self, module: nn.Module, roots: bool) -> list[nn.Module]:
        blocks = self.options.modules_to_wrap(module)
        if not roots:
            return blocks
        # A backward ends the pass of the root and reshards it. So each child is a unit of its own.
        known = {id(block) for block in blocks}
        children = [
            child
            for child in module.children()
            if id(child) not in known
            and getattr_static(type(child), "forward") is not nn.Module.forward
            and not isinstance(child, nn.ModuleList | nn.ModuleDict)
            and any(True for _ in child.parameters())
        ]
        return blocks + children

    def _recompute(self, module: nn.Module) -> None:
        """Enable activation checkpointing. A second call for the same model changes nothing."""
        wanted = self.options.modules_to_checkpoint(module)
        if wanted and any(isinstance(child, CheckpointWrapper) for child in module.modules()):
            warnings.warn(
                "the model has layers in checkpoint_wrapper already; activation_checkpointing="
                f"{self.options.activation_checkpointing!r} of the strategy is ignored",
                stacklevel=2,
            )
            return
        for child in wanted:
            if recompute.state(child) is None:
                recompute(child)

    def _travel_whole(self, module: nn.Module) -> dict[int, dict[str, None]]:
        """Return ``gather_codec=None`` for layers that are not hidden layers, by ``id(layer)``.

        ``fully_shard`` itself recognizes a head by the model around it. It cannot do so if the head
        alone is a unit.
        """
        gather = self.options.engine_options()["gather_codec"]
        if gather is None or gather.policy is not None:
            return {}
        hidden = {id(param) for _, param in split_named_params(module)[0]}
        return {
            id(layer): {"gather_codec": None}
            for layer in module.modules()
            if not any(id(param) in hidden for param in layer.parameters(recurse=False))
            and next(layer.children(), None) is None
        }

    def _policy(self, precision: str, *, is_root: bool) -> MixedPrecisionPolicy:
        return self.options.mp_policy or policy_for(precision, is_root=is_root)


def _is_offloaded(module: nn.Module) -> bool:
    """Whether a budget, of the user's own call too, has chosen to keep shards in host memory."""
    tune = sys.modules.get("vescale_fsdp_tune")
    tuning = None if tune is None else tune.tuning_of(module)
    return tuning is not None and tuning.chosen.candidate.offload


@contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """A context in which backwards reduce gradients, or accumulate them without communication."""
    units = [child for child in module.modules() if isinstance(child, FSDPModule)]
    for unit in units:
        unit.set_requires_gradient_sync(enabled, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)


def set_up_optimizers(optimizers: Iterable[torch.optim.Optimizer], options: Options) -> None:
    """Let optimizers of sharded parameters step as ``offload`` says, and load whole states."""
    for optimizer in optimizers:
        full.take_whole_states(optimizer)
        if options.offload:
            offload_(optimizer, states=options.offload != "parameters")


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], module: nn.Module) -> None:
    """Raise if an optimizer has parameters that are not the model's.

    Raises:
        ValueError: it was made before the model was sharded.
    """
    known = {id(param) for param in module.parameters()}
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        strangers = sum(id(param) not in known for param in params)
        if strangers:
            raise ValueError(
                f"{type(optimizer).__name__} holds {strangers} of {len(params)} parameters that "
                "are not the model's: it was made before the model was sharded, and would not "
                "train the model. Make it in configure_optimizers, from self.parameters(); with "
                "Fabric after setup_module, from model.parameters()"
            )


def owns(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether all parameters of the optimizers are the module's."""
    known = {id(param) for param in module.parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return all(id(param) in known for group in groups for param in group["params"])


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
