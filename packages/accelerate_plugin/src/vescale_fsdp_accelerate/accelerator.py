"""VeScaleAccelerator: Accelerate's ``Accelerator`` with veScale-FSDP as its engine."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from accelerate.accelerator import Accelerator  # type: ignore[import-untyped]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from accelerate.parallelism_config import ParallelismConfig  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
from accelerate.utils import (  # type: ignore[import-untyped]
    DistributedType,
    DynamoBackend,
    is_compiled_module,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from vescale_fsdp import FSDPModule, clip_grad_norm_
from vescale_fsdp.checkpoint import full
from vescale_fsdp.errors import companion
from vescale_fsdp.optim import offload_
from vescale_fsdp.spi import backend_name, begin_load, begin_save, check_reduced
from vescale_fsdp_accelerate import checkpoints, saving
from vescale_fsdp_accelerate.budgets import budget_for
from vescale_fsdp_accelerate.plans import check_sizes
from vescale_fsdp_accelerate.plugin import VeScaleFSDPPlugin
from vescale_fsdp_accelerate.registered import as_whole, refuse_sharded
from vescale_fsdp_accelerate.replacing import (
    Replacement,
    granularity_for,
    refuse_whole,
    replacement_for,
)
from vescale_fsdp_accelerate.sharding import Sharder, units_of, weak_parameters
from vescale_fsdp_accelerate.switching import (
    Switch,
    check_owned,
    granularities_of,
    is_ours,
    warn_of_replaced,
)

if TYPE_CHECKING:
    from vescale_fsdp_elastic import Run

__all__ = ["VeScaleAccelerator"]

_log = logging.getLogger(__name__)


class VeScaleAccelerator(Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` with veScale-FSDP; takes the same arguments.

    ::

        accelerator = VeScaleAccelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Under ``accelerate launch --config vescale.yaml`` the name ``accelerate.Accelerator`` is this
    class. ``prepare`` takes any number of models, with or without optimizers, in any order and
    number of calls; optimizers may have been made before.

    Args:
        fsdp_plugin: a `VeScaleFSDPPlugin`, or one of Accelerate's, whose options are used.
            Default: the options of the yaml.

    Raises:
        ValueError: an option does not work with veScale-FSDP, or the processes of a job are not
            connected.
    """

    # Of Accelerate's class.
    _save_model_state_pre_hook: OrderedDict[int, Callable[..., None]]
    _load_model_state_pre_hook: OrderedDict[int, Callable[..., None]]
    _optimizers: list[Any]

    def __init__(self, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        if fsdp_plugin is None:
            if AcceleratorState._shared_state and getattr(AcceleratorState(), "fsdp_plugin", None):
                fsdp_plugin = AcceleratorState().fsdp_plugin
            else:
                fsdp_plugin = VeScaleFSDPPlugin.from_environment()
        plugin = VeScaleFSDPPlugin.upgraded(fsdp_plugin)
        if kwargs.get("deepspeed_plugin") or kwargs.get("deepspeed_plugins"):
            raise ValueError("VeScaleAccelerator takes no deepspeed_plugin: it is another engine")
        if kwargs.get("megatron_lm_plugin"):
            raise ValueError("VeScaleAccelerator takes no megatron_lm_plugin: it is another engine")
        check_sizes(_asked_parallelism(kwargs), plugin, int(os.environ.get("WORLD_SIZE", "1")))
        super().__init__(*args, fsdp_plugin=plugin, **kwargs)
        self._become_fsdp(plugin)
        self._models: list[nn.Module] = []
        # Passed to `prepare` with the models being sharded.
        self._waiting: list[Optimizer] = []
        self._loaders: list[DataLoader[Any]] = []
        self._switch = Switch()
        # While a state is saved or loaded, by ids of models (see `checkpoints`).
        self.states_of_hooks: dict[int, dict[str, Any]] = {}
        self.loaded_by_hooks: set[int] = set()
        self.tracker_arguments: tuple[Any, ...] | None = None  # of `init_trackers`, if called
        check_sizes(self.parallelism_config, self.state.fsdp_plugin, dist.get_world_size())
        self._sharder = Sharder(self.state.fsdp_plugin, self.device, *self._given_meshes())

    @property
    def is_fsdp2(self) -> bool:
        """True. Accelerate asks for it before `distributed_type` is set, for its config's sizes."""
        return True

    def _become_fsdp(self, plugin: VeScaleFSDPPlugin) -> None:
        """Set Accelerate's distributed type to FSDP, also on CPUs and with one process."""
        if self.state.mixed_precision == "fp8":
            raise ValueError("mixed_precision: fp8 does not work with veScale-FSDP; use bf16 or no")
        if self.state.mixed_precision == "fp16" and self.device.type == "cpu":
            raise ValueError("mixed_precision: fp16 works on GPUs only; use bf16 or no on CPUs")
        kind = self.distributed_type
        if kind is DistributedType.FSDP and getattr(self.state, "fsdp_plugin", None) is not None:
            return
        if kind is DistributedType.NO:
            self._be_one_process()
        elif kind not in (DistributedType.MULTI_CPU, DistributedType.FSDP):
            raise ValueError(
                f"veScale-FSDP was asked for, and Accelerate has chosen {kind}; set "
                "distributed_type: FSDP"
            )
        if self.state.mixed_precision != "no":
            plugin.set_mixed_precision(self.state.mixed_precision)
        for shared in (self.state, PartialState()):
            shared.distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin = plugin

    def _be_one_process(self) -> None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size > 1:
            raise ValueError(
                f"this is one of {world_size} processes, and none of them has found a device of "
                "its own: each would train alone. On CPUs set use_cpu: true in the yaml"
            )
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
            )
        for shared in (self.state, PartialState()):
            shared.backend = backend_name(None, self.device)

    def _given_meshes(self) -> tuple[Any, Any]:
        """Return the parallelism config's mesh to shard over, and that of tensor parallelism."""
        config, mesh = self.parallelism_config, self.torch_device_mesh
        if config is None or mesh is None:
            return None, None
        return mesh[tuple(config.dp_dim_names)], mesh["tp"] if config.tp_enabled else None

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The mesh of experts: dims ``efsdp`` and ``ep``, and ``dp_replicate`` with replicas.

        Collective at the first call, which may be that of `prepare`.

        Raises:
            ValueError: there is no expert parallelism.
        """
        experts = self._sharder.meshes.experts
        if experts is None:
            raise ValueError(
                "there is no mesh of experts: set fsdp_vescale_ep_size, or "
                "VeScaleFSDPPlugin(ep_size=...), to at least 2"
            )
        return experts

    # Preparation

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard models, move optimizers to their parameters, and wrap data loaders and schedulers.

        Returns:
            The same objects or their wrappers, in the same order.
        """
        placements = device_placement or [None] * len(args)  # type: ignore[list-item]
        if len(placements) != len(args):
            raise ValueError(
                f"prepare(device_placement=...) has {len(placements)} entries for {len(args)} "
                "objects"
            )
        self._waiting = [each for each in args if isinstance(each, Optimizer)]
        self._loaders = [each for each in args if isinstance(each, DataLoader)]
        try:
            models = {
                id(each): self.prepare_model(each) for each in args if isinstance(each, nn.Module)
            }
        finally:
            self._waiting, self._loaders = [], []
        for optimizer in self._inner(args) if models else ():
            self._switch.move([optimizer])
            check_owned(optimizer, self._models)
        result = []
        for each, placement in zip(args, placements, strict=True):
            if isinstance(each, nn.Module):
                result.append(models[id(each)])
            else:
                result.append(self._prepare_one(each, first_pass=True, device_placement=placement))
        result = [
            each if isinstance(each, nn.Module) else self._prepare_one(each) for each in result
        ]
        known = (self._dataloaders, self._models, self._optimizers, self._schedulers)
        for each in result:
            if any(each is other for container in known for other in container):
                each._is_accelerate_prepared = True  # type: ignore[assignment]
        return tuple(result) if len(result) != 1 else result[0]

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Shard a model, in place. Collective.

        Args:
            evaluation_mode: has no effect: a sharded model can be trained later.
        """
        if self.verify_device_map(model):
            raise ValueError(
                "veScale-FSDP cannot shard a model that was loaded with device_map='auto'; load it "
                "without device_map"
            )
        if not any(each is model for each in self._models):
            self._models.append(model)
        # What it is, and not what Accelerate has marked: a copy has the mark too, and a module
        # around it may pass it on.
        bare: Any = model._orig_mod if is_compiled_module(model) else model
        is_sharded = isinstance(bare, FSDPModule)
        last = weak_parameters(model)
        optimizers = self._known_optimizers()
        needs = [need for each in optimizers for need in granularities_of(each)]
        plugin = self.state.fsdp_plugin
        by_name = granularity_for(plugin.optimizer, plugin.optimizer_args or {})
        needs += [] if by_name is None else [by_name]
        if is_sharded:
            for _ in self._sharder.shard_late(bare, needs):
                self._switch.record(model, last)
                self._switch.move(optimizers)
            check_reduced(bare, "prepare")
            return model
        budget = budget_for(
            plugin.budget,
            model,
            [*self._loaders, *self._dataloaders],
            self.num_processes if self.split_batches else 1,
            self.gradient_accumulation_steps,
        )
        for _ in self._sharder.shard(model, needs, budget):
            self._switch.record(model, last)
            self._switch.move(optimizers)
        check_reduced(bare, "prepare")
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        self._compile(model)
        return model

    def _known_optimizers(self) -> list[Optimizer]:
        return self._inner([*self._optimizers, *self._waiting])

    @staticmethod
    def _inner(objects: Iterable[Any]) -> list[Optimizer]:
        """Return the optimizers among objects, without wrappers."""
        plain = [unwrapped(each) for each in objects if isinstance(each, Optimizer)]
        return [each.inner if isinstance(each, Replacement) else each for each in plain]

    def _compile(self, model: nn.Module) -> None:
        if self.state.dynamo_plugin.backend == DynamoBackend.NO:
            return
        kwargs = self.state.dynamo_plugin.to_kwargs()
        # Only forwards are compiled: all-gathers stay outside of the graphs.
        blocks = [each for each in model.modules() if isinstance(each, FSDPModule)]
        inner: list[Any] = [each for each in blocks if each is not model]
        for each in inner or [model]:
            # Bound, so that a copy of the module calls itself.
            each.forward = MethodType(torch.compile(_function(each.forward), **kwargs), each)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer that has the sharded parameters.

        With ``fsdp_vescale_optimizer`` another one replaces it, unless it is one of ours.

        Raises:
            ValueError: the optimizer needs full tensors and is not replaced.
        """
        self._switch.move(self._inner([optimizer]))
        if isinstance(optimizer, AcceleratedOptimizer):
            if not any(each is optimizer for each in self._optimizers):
                self._optimizers.append(optimizer)
            return optimizer
        warn_of_replaced(optimizer)
        plugin = self.state.fsdp_plugin
        if plugin.optimizer is None:
            refuse_whole(optimizer)
        elif not is_ours(optimizer):
            args = plugin.optimizer_args or {}
            optimizer = replacement_for(optimizer, list(self._models), plugin.optimizer, args)
        full.take_whole_states(optimizer)
        if plugin.offload is not None:
            offload_(optimizer, states=plugin.offload != "parameters")
        return super().prepare_optimizer(optimizer, device_placement=False)

    # Steps

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients without communication."""
        with _sync(model, False):
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """A context in which backwards reduce gradients, also inside `no_sync`."""
        with _sync(model, True):
            yield

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients so that their norm over all processes is at most ``max_norm``.

        Returns:
            The norm before scaling, as a plain tensor.
        """
        self.unscale_gradients()
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        return clip_grad_norm_(params, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit each element of the gradients."""
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value)

    def gather(self, tensor: Any) -> Any:
        """Gather a tensor from all processes, as in Accelerate.

        Raises:
            TypeError: a tensor is sharded: it was computed from sharded parameters.
        """
        for each in tree_leaves(tensor):
            if isinstance(each, DTensor):
                raise TypeError(
                    f"gather got a sharded tensor ({type(each).__name__} of shape "
                    f"{tuple(each.shape)}), expected a plain tensor. It was computed "
                    "from parameters outside of a forward, where they are sharded: use "
                    "weight.full_tensor() there, or compute it within `with vescale_fsdp."
                    "unsharded(model, recurse=False):`"
                )
        return super().gather(tensor)

    def elastic_training(
        self, directory: Any, *, stateful: Mapping[str, Any] | None = None, **options: Any
    ) -> AbstractContextManager[Run]:
        """Train under ``torchrun --nnodes 1:4 --max-restarts N``, with ranks that come and go.

        ::

            with accelerator.elastic_training("runs/elastic", every=10) as run:
                for step in run.batches(data, global_batch=64, micro_batch=8, until=10_000):
                    for inputs, targets in step:
                        step.backward(loss_of(model(inputs), targets))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

        It is `vescale_fsdp_elastic.training` with the model, optimizers and schedulers that were
        prepared, and the objects that were registered for checkpointing. In it a prepared scheduler
        steps once for each step of the optimizer, whatever the number of processes.
        ``step.backward`` scales the loss in fp16, as `backward` does.

        Args:
            directory: of the run on disk, which all processes share.
            stateful: further objects by name.
            options: of `vescale_fsdp_elastic.training`.

        Raises:
            ValueError: more or fewer models than one have been prepared, or
                ``gradient_accumulation_steps`` is not 1.
            ImportError: the package for it is not installed.
        """
        asks = "accelerator.elastic_training"
        companion("vescale_fsdp_elastic", asks, "vescale-fsdp-accelerate[elastic]")
        from vescale_fsdp_accelerate.elastic.training import elastic_training

        return elastic_training(self, directory, stateful, options)

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start the trackers of ``log_with`` in the main process.

        If an elastic training goes on without this process, they are started in the next main one.
        """
        self.tracker_arguments = (project_name, config, init_kwargs or {})
        super().init_trackers(*self.tracker_arguments)

    # Checkpoints

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Save models, optimizers, schedulers, random numbers and other registered objects.

        The save replaces an earlier one completely or not at all: if a process is killed in the
        middle, the earlier state remains. Other files in the directory do not change.
        With automatic naming, old checkpoints are deleted after the new one is complete.

        Args:
            output_dir: on a file system that all processes share.

        Returns:
            The directory.

        Raises:
            ValueError: a module was added to a model after `prepare`, and is trained by each
                process alone.
        """
        begin_save()
        for model in self._models:
            check_reduced(model, "save_state")
        config = self.project_configuration
        is_named = config.automatic_checkpoint_naming
        if is_named:
            folder = Path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
            if folder.is_dir() and saving.is_whole(folder):
                raise ValueError(
                    f"{folder} exists already; set accelerator.project_configuration.iteration to "
                    "the number for this checkpoint"
                )
        else:
            folder = Path(output_dir).expanduser()
        stage = saving.begin(folder)
        config.automatic_checkpoint_naming = False
        try:
            with as_whole(self), self._after_save_hooks(str(stage)):
                for index, model in enumerate(self._models):
                    checkpoints.save_model(self, model, str(stage), index)
                for index, optimizer in enumerate(self._optimizers):
                    checkpoints.save_optimizer(self, optimizer, str(stage), index)
                with self._without_models():
                    super().save_state(str(stage), safe_serialization, **save_model_func_kwargs)
        finally:
            config.automatic_checkpoint_naming = is_named
        self.wait_for_everyone()
        saving.finish(folder, is_written=True)
        if is_named and config.total_limit is not None:
            saving.prune(folder.parent, config.total_limit)
        return str(folder)

    def load_state(
        self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any
    ) -> None:
        """Load a checkpoint of `save_state`, on any number of processes.

        Args:
            input_dir: of one checkpoint. With automatic naming, by default the last complete one.

        Raises:
            CheckpointCorruptError: bytes of a sealed checkpoint differ from those that were saved.
                Nothing has been loaded then.
        """
        begin_load()
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = saving.latest(Path(self.project_dir) / "checkpoints")
        folder = None if input_dir is None else Path(input_dir).expanduser()
        if folder is not None and folder.is_dir():
            saving.finish(folder)
            checkpoints.verify(folder)
        with as_whole(self), self._after_load_hooks(input_dir):
            if folder is not None and folder.is_dir():
                for index, model in enumerate(self._models):
                    checkpoints.load_model(self, model, str(folder), index)
                for index, optimizer in enumerate(self._optimizers):
                    checkpoints.load_optimizer(self, optimizer, str(folder), index)
            with self._without_models():  # raises if there is none
                super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)

    @contextmanager
    def _without_models(self) -> Iterator[None]:
        """In it Accelerate saves and loads all but models and optimizers, for which it has FSDP."""
        kept = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = kept

    # With FSDP, Accelerate calls the hooks of users after models were saved and loaded, and without
    # them. Here hooks come before, with the models and state dicts, as with DDP.

    @contextmanager
    def _after_save_hooks(self, output_dir: str) -> Iterator[None]:
        """Call the hooks before a save; in this context models have the states that they leave."""
        hooks, self._save_model_state_pre_hook = self._save_model_state_pre_hook, OrderedDict()
        try:
            if hooks:
                states = [full.model_state(model) for model in self._models]
                weights = list(states)

                def kept() -> list[dict[str, Any]]:
                    # A state that a hook has taken is saved all the same, as Accelerate does with
                    # FSDP: hooks for that take it in the main process, and do not load the model.
                    return weights if len(weights) == len(states) else states

                def call() -> list[str]:
                    _call(hooks, self._models, weights, output_dir)
                    kinds = {True: "sharded", False: "whole"}
                    return [
                        f"{kinds[isinstance(value, DTensor)]} {name} of model {i}"
                        for i, state in enumerate(kept())
                        for name, value in state.items()
                    ]

                saving.in_each(call, alike="the states that save_state hooks have left")
                self.states_of_hooks = dict(zip(map(id, self._models), kept(), strict=True))
            yield
        finally:
            self._save_model_state_pre_hook, self.states_of_hooks = hooks, {}

    @contextmanager
    def _after_load_hooks(self, input_dir: Any) -> Iterator[None]:
        """Call the hooks before a load; in this context models that they took are not loaded."""
        hooks, self._load_model_state_pre_hook = self._load_model_state_pre_hook, OrderedDict()
        try:
            if hooks and input_dir is not None and Path(input_dir).expanduser().is_dir():
                left = list(self._models)
                folder = str(Path(input_dir).expanduser())

                def call() -> list[str]:
                    _call(hooks, left, folder)
                    own = list(map(id, self._models))
                    return [f"model {own.index(id(each))}" for each in left if id(each) in own]

                saving.in_each(call, alike="the models that load_state hooks have left")
                self.loaded_by_hooks = set(map(id, self._models)) - set(map(id, left))
            yield
        finally:
            self._load_model_state_pre_hook, self.loaded_by_hooks = hooks, set()

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object in the first process, as in Accelerate.

        Raises:
            TypeError: a tensor in it is sharded.
        """
        refuse_sharded(obj)
        super().save(obj, f, safe_serialization=safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's full tensors in the first process, and {} in the others."""
        found: dict[str, Any] = full.gathered(full.model_state(model), keep=self.is_main_process)
        return found if self.is_main_process else {}


def _call(hooks: Mapping[int, Callable[..., None]], *args: Any) -> None:
    for hook in hooks.values():
        hook(*args)


def _asked_parallelism(kwargs: dict[str, Any]) -> Any:
    """Return the parallelism config that Accelerate will use; None if there is none."""
    given = kwargs.get("parallelism_config")
    if given is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        return ParallelismConfig()
    return given


_switched_off: WeakSet[nn.Module] = WeakSet()


@contextmanager
def _sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    was_enabled = model not in _switched_off
    _set_sync(model, enabled)
    try:
        yield
    finally:
        _set_sync(model, was_enabled)


def _set_sync(model: nn.Module, enabled: bool) -> None:
    (_switched_off.discard if enabled else _switched_off.add)(model)
    for unit in units_of(model):
        unit.set_requires_gradient_sync(enabled, recurse=False)


def _function(method: Any) -> Callable[..., Any]:
    """Return the function of a bound method, or one that takes ``self`` too."""
    if isinstance(method, MethodType):
        return method.__func__

    def function(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return function


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the user's optimizer."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    found: Optimizer = optimizer
    return found
