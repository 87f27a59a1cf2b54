"""The strategy for Lightning's Trainer: the methods that the Trainer calls.

`Lifecycle` is a mixin for Lightning's ``ParallelStrategy`` (one class for each namespace of
Lightning, see `_autoload`), whose own methods assume one process and full parameters.

There is no engine logic here. The LightningModule is the root unit. Its steps are registered as
forward methods: ``training_step`` unshards the root's parameters, and a call ``self(x)`` in it
belongs to the same pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from vescale_fsdp import clip_grad_norm_, stream_parameters
from vescale_fsdp.checkpoint import full
from vescale_fsdp.spi import begin_load, begin_save, check_reduced
from vescale_fsdp_lightning.checkpoints import Loading
from vescale_fsdp_lightning.places import agree, from_first
from vescale_fsdp_lightning.plain import to_plain
from vescale_fsdp_lightning.precision import check_precision
from vescale_fsdp_lightning.sharding import (
    DEFAULT_TIMEOUT,
    MakeOptimizer,
    Sharding,
    check_optimizers,
    gradient_sync,
    owns,
    set_up_optimizers,
)

if TYPE_CHECKING:
    from vescale_fsdp_elastic import Run
    from vescale_fsdp_lightning.elastic import Elastic

__all__ = ["Lifecycle"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Callbacks of Lightning that need full parameters, and what to use instead.
_REFUSED = {
    "WeightAveraging": "use vescale_fsdp_lightning.ShardedEMA, which averages the shards",
    "StochasticWeightAveraging": "use vescale_fsdp_lightning.ShardedEMA, which averages the shards",
    "ModelPruning": "prune the model before training, or in configure_model",
}


class Lifecycle(Sharding):
    """`Sharding` for ``Trainer(strategy="vescale_fsdp")``. `Sharding` documents the arguments."""

    strategy_name = "vescale_fsdp"
    lightning_module: Any  # of Lightning's base class
    _checkpoint_io: Any  # of Lightning's base class: the plug-in that the user passed
    _loading: Loading | None = None  # until the module's hook has seen the checkpoint
    _copy = ExitStack()  # of a checkpoint on another file system, until all hooks have seen it

    @cached_property
    def _elastic(self) -> Elastic | None:
        """Loaded only if the user has asked for it."""
        if self.options.elastic is None:
            return None
        from vescale_fsdp_lightning.elastic import Elastic

        return Elastic(self)

    @property
    def elastic_run(self) -> Run | None:
        """The elastic training of the ``fit`` under way: its attempt, source and costs."""
        fit = None if self._elastic is None else self._elastic.fit
        return None if fit is None else fit.run

    # Processes

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._launcher is None:  # torchrun has started the processes
            self._launcher = self._elastic

    def _init_process_group(self, backend: str | None, **options: Any) -> None:
        if self._elastic is None:
            super()._init_process_group(backend, **options)
        else:
            limit = None if self._timeout is DEFAULT_TIMEOUT else self._timeout  # the user's
            self._elastic.init_process_group(backend, limit, **options)

    def setup_environment(self) -> None:
        """Start ``torch.distributed``, and make a mesh of all processes."""
        self._setup_distributed()
        self._set_world_ranks()  # elastic ranks have met now
        self._start_mesh()
        self.lightning_module._device_mesh = self._device_mesh

    def set_world_ranks(self) -> None:
        """Tell Lightning the rank of this process."""
        self._set_world_ranks()

    def _set_world_ranks(self) -> None:
        super()._set_world_ranks()
        if self._elastic is not None:
            own = self._elastic.rank_of(self.global_rank)
            rank_zero_only.rank = own  # type: ignore[attr-defined]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """`all_reduce`, under the name that the Trainer calls."""
        return self.all_reduce(tensor, group, reduce_op)

    def teardown(self) -> None:
        """Wait for saves in the background, ours and those of a plug-in of Lightning."""
        try:
            self._copy.close()
            if self._elastic is not None:
                self._elastic.end()
            self._checkpoints.store.finish()
            if self._checkpoint_io is not None:
                self.checkpoint_io.teardown()
        finally:  # super().teardown() is not called, because it moves the model to the CPU
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()

    # Precision

    @property
    def precision_plugin(self) -> Any:
        """Lightning's precision plug-in. Its clipping by norm is replaced by the engine's."""
        return super().precision_plugin  # type: ignore[misc]

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            check_precision(plugin)

            def clip_grad_by_norm(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
                clip_grad_norm_(plugin.main_params(optimizer), clip_val)

            plugin.clip_grad_by_norm = clip_grad_by_norm
        self._precision_plugin = plugin

    # Model and optimizers

    def setup(self, trainer: Any) -> None:
        """Shard the model, then call ``configure_optimizers`` with the sharded parameters."""
        self.accelerator.setup(trainer)
        refuse_callbacks(trainer.callbacks)
        leave_inference_mode(trainer)
        if self._checkpoint_io is not None and self.options.state_dict_type != "full":
            raise ValueError(
                f"a {type(self._checkpoint_io).__name__} writes files, and "
                f"state_dict_type={self.options.state_dict_type!r} saves directories; pass "
                'VeScaleFSDPStrategy(state_dict_type="full"), or leave the plug-in out'
            )
        self._is_fitting = trainer.state.fn.value == "fit"
        if self._is_fitting and self._elastic is not None:
            self._elastic.prepare(trainer)
        module = self.lightning_module
        if not any(hasattr(param, "device_mesh") for param in module.parameters()):
            module = self.precision_plugin.convert_module(module)
            if self._layer_sync is not None:  # type: ignore[attr-defined]
                module = self._layer_sync.apply(module)  # type: ignore[attr-defined]
        self._shard(
            module,
            self.precision_plugin.precision,
            methods=_STEPS,
            roots=not module.automatic_optimization,
        )
        self.model: nn.Module = module
        self.barrier()
        if self._is_fitting:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, module)  # type: ignore[attr-defined]
            set_up_optimizers(self.optimizers, self.options)  # type: ignore[attr-defined]
            saves = self.options.state_dict_type == "sharded" and trainer.checkpoint_callbacks
            if saves or self._elastic is not None:
                agree(lambda: check_states(trainer))
        elif not owns(module, self.optimizers):  # type: ignore[attr-defined]
            self._reset_optimizers_and_schedulers()  # type: ignore[attr-defined]  # of another model
        self._companions = {name: make(module) for name, make in self._to_save_too.items()}
        self.setup_precision_plugin()  # type: ignore[attr-defined]
        if self._elastic is not None and self._elastic.fit is not None:
            self._elastic.fit.restore(module, {**self._own_optimizers(), **self._companions})

    def setup_optimizers(self, trainer: Any) -> None:
        """Call ``configure_optimizers``. Optimizers of an earlier model are dropped."""
        self._reset_optimizers_and_schedulers()  # type: ignore[attr-defined]
        super().setup_optimizers(trainer)  # type: ignore[misc]

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init``, make modules on the meta device. `setup` allocates memory."""
        device = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """Do nothing: ``fully_shard`` has moved shards and buffers to the device."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        with gradient_sync(self.model, False):
            yield

    # The loop

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader of this rank's samples."""
        made = super().process_dataloader(dataloader)  # type: ignore[misc]
        return made if self._elastic is None else self._elastic.divide(made)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call backward, in an elastic training on the loss with the weight of its micro-batch."""
        weight = 1.0 if self._elastic is None else self._elastic.weight
        return super().backward(loss if weight == 1.0 else loss * weight, *args, **kwargs)  # type: ignore[misc]

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch."""
        if self._elastic is not None:
            self._elastic.begin_batch()
        return super().batch_to_device(batch, *args, **kwargs)  # type: ignore[misc]

    def on_train_end(self) -> None:
        """Save the last state of an elastic training."""
        super().on_train_end()  # type: ignore[misc]
        if self._elastic is not None:
            self._elastic.end()

    # A local copy of a checkpoint is there until hooks can no longer look at its tensors.

    def on_train_start(self) -> None:
        """Delete it: all is loaded. An elastic training begins where the restored state is."""
        self._copy.close()
        super().on_train_start()  # type: ignore[misc]
        if self._elastic is not None and self._elastic.fit is not None:
            self._elastic.fit.start()

    def on_validation_start(self) -> None:
        """The same for the other loops."""
        self._copy.close()
        super().on_validation_start()  # type: ignore[misc]

    def on_test_start(self) -> None:
        """The same."""
        self._copy.close()
        super().on_test_start()  # type: ignore[misc]

    def on_predict_start(self) -> None:
        """The same."""
        self._copy.close()
        super().on_predict_start()  # type: ignore[misc]

    def on_exception(self, exception: BaseException) -> None:
        """Delete it without waiting for others, who may have no error."""
        self.drop_copy()
        super().on_exception(exception)  # type: ignore[misc]
        if self._elastic is not None:
            self._elastic.close(exception)

    def drop_copy(self) -> None:
        """Delete it without waiting for others."""
        self._loading = None
        self._copy.__exit__(GeneratorExit, GeneratorExit(), None)

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, because values are loaded into the shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False, because `load_model_state_dict` restores optimizers."""
        return False

    @property
    def checkpoint_io(self) -> Any:
        """The plug-in that the user passed, or else Lightning's default one.

        Lightning's property would store the default plug-in, which then looks like one that the
        user passed.
        """
        passed = self._checkpoint_io
        found = super().checkpoint_io  # type: ignore[misc]
        self._checkpoint_io = passed
        return found

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        self._checkpoint_io = plugin

    def save_too(self, name: str, make: MakeOptimizer) -> None:
        """Add the state of one more optimizer to checkpoints. `ShardedEMA` uses this.

        Args:
            name: its name in the checkpoint.
            make: makes it. Called with the sharded model, before checkpoints are loaded.
        """
        self._to_save_too[name] = make

    def saved_too(self, name: str) -> torch.optim.Optimizer:
        """Return the optimizer that was added by `save_too`."""
        return self._companions[name]

    def stream_parameters(self, **options: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The whole parameters of the LightningModule, one after the other. Collective.

        Args:
            options: those of `vescale_fsdp.stream_parameters`.
        """
        module = self.lightning_module
        return stream_parameters(module, **options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state: sharded tensors, or full ones in the first process only."""
        if self._elastic is not None and self._elastic.is_dumping:
            return full.model_state(self.model)
        return self._checkpoints.model_state(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state: sharded tensors, or full ones in the first process only."""
        own = getattr(optimizer, "_optimizer", optimizer)
        if self._elastic is not None and self._elastic.is_dumping:
            return dict(own.state_dict())
        return self._checkpoints.optimizer_state(self.model, own)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save the dictionary of ``dump_checkpoint``. Collective. See `checkpoints`."""
        if storage_options is not None:
            raise TypeError(
                "VeScaleFSDPStrategy.save_checkpoint takes no storage_options; set them by the "
                "path's protocol or the environment, as for fsspec"
            )
        begin_save()
        check_reduced(self.lightning_module, "save_checkpoint")  # in each format
        target = from_first(lambda: str(filepath))
        if self._elastic is not None:
            checkpoint = self._elastic.with_counts(checkpoint)
        optimizers = dict(self._companions)  # averages are also saved with weights_only
        if "optimizer_states" in checkpoint:
            optimizers |= self._own_optimizers()
        is_plugin = self._checkpoint_io is not None
        write = self.checkpoint_io.save_checkpoint if is_plugin else None
        self._checkpoints.save(target, checkpoint, self.model, optimizers, write)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Open a checkpoint in any format, and return its dictionary. Collective.

        Model and optimizers are loaded by `load_model_state_dict`, after ``on_load_checkpoint`` of
        the module, which may change ``checkpoint["state_dict"]``.
        """
        fit = None if self._elastic is None else self._elastic.fit
        if fit is not None and fit.loaded is not None:
            return fit.as_checkpoint()  # what this run has made of it is newer
        begin_load()
        self._copy.close()
        source = from_first(lambda: str(checkpoint_path))
        loading = self._checkpoints.open(
            source, weights_only=weights_only, local_rank=self.local_rank
        )
        self._loading, self._copy = loading, loading.copy
        if fit is not None:
            fit.adopt(loading.values, source)
        return loading.values

    def _restore_groups(self, saved: Mapping[str, Any]) -> None:
        """Restore the parameter groups that finetuning callbacks had added to optimizers.

        It must be done before the optimizers' states are loaded. The callbacks do it in
        ``on_fit_start`` if their own states are loaded by then. With strategies that load after
        sharding they are not, so it is called here.
        """
        module = self.lightning_module
        states = saved.get("callbacks") or {}
        for callback in finetuning_callbacks(module.trainer):
            if callback.state_key in states:
                callback.load_state_dict(copy.deepcopy(states[callback.state_key]))
                base_finetuning(callback).on_fit_start(callback, module.trainer, module)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint. If a save runs in the background, after it has ended."""
        self._checkpoints.store.remove(str(filepath))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load model and optimizers in place. Collective. See `checkpoints`.

        Args:
            checkpoint: the dictionary of `load_checkpoint`, as hooks have left it. That of an
                elastic training is not loaded: its state is there already.
        """
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.load(
                self.model,
                {**(self._own_optimizers() if self._is_fitting else {}), **self._companions},
                checkpoint,
                strict=strict,
                prepare=self._restore_groups if self._is_fitting else None,
            )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_model_state_dict` has loaded the optimizers."""
        for callback in finetuning_callbacks(self.lightning_module.trainer):
            callback._restarting = False

    def _own_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {str(i): each for i, each in enumerate(self.optimizers)}  # type: ignore[attr-defined]


def base_finetuning(callback: Any) -> Any:
    """Return Lightning's ``BaseFinetuning`` of the namespace of a callback; None if it has none."""
    return next((c for c in type(callback).__mro__ if c.__name__ == "BaseFinetuning"), None)


def finetuning_callbacks(trainer: Any) -> list[Any]:
    """Return the callbacks that freeze layers, and add groups to optimizers when they unfreeze."""
    return [each for each in trainer.callbacks if base_finetuning(each) is not None]


def check_states(trainer: Any) -> None:
    """Check before training that a sealed checkpoint can store the states of this Trainer.

    This calls ``on_save_checkpoint`` of the module once, with an empty ``state_dict``. If that
    raises, for example because it needs values of the training, the first save checks its values.

    Raises:
        CheckpointValueError: a state could only be pickled. For a hyper-parameter it only warns.
    """
    states: dict[str, Any] = {}
    savers = trainer.checkpoint_callbacks
    if not all(getattr(saver, "save_weights_only", False) for saver in savers):
        stateful = {callback.state_key: callback for callback in trainer.callbacks}
        states["callbacks"] = {key: _state_of(each) for key, each in stateful.items()}
        configs = trainer.strategy.lr_scheduler_configs
        states["lr_schedulers"] = [_state_of(config.scheduler) for config in configs]
    for source in (trainer.lightning_module, trainer.datamodule):
        if source is not None and source.hparams:
            states[source.CHECKPOINT_HYPER_PARAMS_KEY] = source.hparams
    if trainer.datamodule is not None:
        states[type(trainer.datamodule).__qualname__] = _state_of(trainer.datamodule)
    to_plain({**states, **_added_by(trainer.lightning_module, states)})


def _added_by(module: Any, states: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: dict(each) if isinstance(each, dict) else each for key, each in states.items()}
    checkpoint = {"state_dict": {}, "epoch": 0, "global_step": 0, **own}
    try:
        module.on_save_checkpoint(checkpoint)
    except Exception:  # noqa: BLE001  it may need values of the training
        return {}
    return {key: value for key, value in checkpoint.items() if key != "state_dict"}


def _state_of(stateful: Any) -> Any:
    try:
        return stateful.state_dict()
    except Exception:  # noqa: BLE001  it may have no state before training
        return None


def leave_inference_mode(trainer: Any) -> None:
    """Make the evaluation loops use ``no_grad`` instead of inference mode.

    Parameters that are unsharded in inference mode cannot be trained later. Lightning makes this
    change itself for its own FSDP strategy and for gloo, but not for other strategies on CUDA.
    """
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in (*loops, trainer.predict_loop):
        loop.inference_mode = False


def refuse_callbacks(callbacks: list[Any]) -> None:
    """Raise for callbacks that do not work with sharded parameters.

    Raises:
        NotImplementedError: names the callback, and what to use.
    """
    for callback in callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _REFUSED and "lightning" in cls.__module__.partition(".")[0]:
                raise NotImplementedError(
                    f'{type(callback).__name__} does not work with strategy="vescale_fsdp", whose '
                    f"parameters are sharded: {_REFUSED[cls.__name__]}"
                )
