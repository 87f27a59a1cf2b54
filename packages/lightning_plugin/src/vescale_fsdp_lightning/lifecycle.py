"""What the strategy does at each point of the life cycle of Lightning's Trainer.

`Lifecycle` is mixed into Lightning's ``ParallelStrategy`` (once per namespace of Lightning, see
`_autoload`), whose methods know of one process and of whole parameters.

It holds no engine logic. The LightningModule itself is the root unit, and its steps are forward
methods of it: ``training_step`` gathers what the module owns, and a ``self(x)`` inside of it is
part of the same pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale_fsdp import clip_grad_norm_
from vescale_fsdp_lightning.places import agree
from vescale_fsdp_lightning.plain import to_plain
from vescale_fsdp_lightning.precision import check_precision
from vescale_fsdp_lightning.sharding import (
    MakeOptimizer,
    Sharding,
    check_optimizers,
    gradient_sync,
    owns,
)

__all__ = ["Lifecycle"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Callbacks of Lightning that work on whole parameters, and what to use.
_REFUSED = {
    "WeightAveraging": "use vescale_fsdp_lightning.ShardedEMA, which averages the shards",
    "StochasticWeightAveraging": "use vescale_fsdp_lightning.ShardedEMA, which averages the shards",
    "ModelPruning": "prune the model before training, or in configure_model",
}


class Lifecycle(Sharding):
    """`Sharding` for ``Trainer(strategy="vescale_fsdp")``; that has the arguments."""

    strategy_name = "vescale_fsdp"
    _checkpoint_io: Any  # of Lightning's: what was passed

    # Processes

    def setup_environment(self) -> None:
        """Start ``torch.distributed``, and a mesh over all processes."""
        self._setup_distributed()
        self._start_mesh()
        self.lightning_module._device_mesh = self._device_mesh  # type: ignore[attr-defined]

    def set_world_ranks(self) -> None:
        """Tell Lightning which process this is."""
        self._set_world_ranks()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """`all_reduce`, as the Trainer calls it."""
        return self.all_reduce(tensor, group, reduce_op)

    def teardown(self) -> None:
        """Wait for what is being saved in the background, by us or by a plug-in of Lightning's."""
        try:
            self._checkpoints.store.finish()
            if self._checkpoint_io is not None:
                self.checkpoint_io.teardown()
        finally:  # not the base's: it moves the model to the CPU
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()

    # Precision

    @property
    def precision_plugin(self) -> Any:
        """Lightning's precision plug-in; its clipping by norm is replaced by the engine's."""
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
        """Shard the model, then let the user make optimizers on the sharded parameters."""
        self.accelerator.setup(trainer)
        refuse_callbacks(trainer.callbacks)
        leave_inference_mode(trainer)
        if self._checkpoint_io is not None and self.options.state_dict_type != "full":
            raise ValueError(
                f"a {type(self._checkpoint_io).__name__} writes files, and "
                f"state_dict_type={self.options.state_dict_type!r} saves directories; pass "
                'VeScaleFSDPStrategy(state_dict_type="full"), or leave the plug-in out'
            )
        module = self.lightning_module  # type: ignore[attr-defined]
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
        self._is_fitting = trainer.state.fn.value == "fit"
        if self._is_fitting:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, module)  # type: ignore[attr-defined]
            if self.options.state_dict_type == "sharded" and trainer.checkpoint_callbacks:
                agree(lambda: check_states(trainer))
        elif not owns(module, self.optimizers):  # type: ignore[attr-defined]
            self._reset_optimizers_and_schedulers()  # type: ignore[attr-defined]  # of another model
        self._companions = {name: make(module) for name, make in self._to_save_too.items()}
        self.setup_precision_plugin()  # type: ignore[attr-defined]

    def setup_optimizers(self, trainer: Any) -> None:
        """Have the user make optimizers; those of an earlier model are dropped."""
        self._reset_optimizers_and_schedulers()  # type: ignore[attr-defined]
        super().setup_optimizers(trainer)  # type: ignore[misc]

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init`` on the meta device; memory comes in `setup`."""
        device = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """``fully_shard`` has put the shards and buffers on the device."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        with gradient_sync(self.model, False):
            yield

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Values are loaded into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_checkpoint` restores them."""
        return False

    @property
    def checkpoint_io(self) -> Any:
        """The plug-in that was passed; or Lightning's default one, which is not kept.

        Lightning makes that when this is read, and it would look like one that was passed.
        """
        passed = self._checkpoint_io
        found = super().checkpoint_io  # type: ignore[misc]
        self._checkpoint_io = passed
        return found

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        self._checkpoint_io = plugin

    def save_too(self, name: str, make: MakeOptimizer) -> None:
        """Have checkpoints hold the state of one more optimizer, as `ShardedEMA` is one.

        Args:
            name: of it in the checkpoint.
            make: is called with the sharded model, before checkpoints are loaded.
        """
        self._to_save_too[name] = make

    def saved_too(self, name: str) -> torch.optim.Optimizer:
        """What was made for `save_too`."""
        return self._companions[name]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state: sharded tensors; or whole ones, in the first process only."""
        return self._checkpoints.model_state(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """An optimizer's state: sharded tensors; or whole ones, in the first process only."""
        return self._checkpoints.optimizer_state(
            self.model, getattr(optimizer, "_optimizer", optimizer)
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save what ``dump_checkpoint`` has collected. Collective. See `checkpoints`."""
        if storage_options is not None:
            raise TypeError(
                "VeScaleFSDPStrategy.save_checkpoint takes no storage_options; set them by the "
                "path's protocol or the environment, as for fsspec"
            )
        target = str(self.broadcast(filepath))
        optimizers = dict(self._companions)  # averages are weights: saved with weights alone, too
        if "optimizer_states" in checkpoint:
            optimizers |= self._own_optimizers()
        is_plugin = self._checkpoint_io is not None
        write = self.checkpoint_io.save_checkpoint if is_plugin else None
        self._checkpoints.save(target, checkpoint, self.model, optimizers, write)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load model and optimizers in place, of any format and number of processes. Collective."""
        source = str(self.broadcast(checkpoint_path))
        strict = self.lightning_module.strict_loading  # type: ignore[attr-defined]
        return self._checkpoints.load(
            source,
            self.model,
            {**(self._own_optimizers() if self._is_fitting else {}), **self._companions},
            strict=strict,
            weights_only=weights_only,
            local_rank=self.local_rank,
            prepare=self._restore_groups if self._is_fitting else None,
        )

    def _restore_groups(self, saved: Mapping[str, Any]) -> None:
        """Give optimizers the groups that callbacks for finetuning had added, before their states.

        Those do so when a fit starts, if they have their states by then; with strategies that load
        after sharding they do not.
        """
        module = self.lightning_module  # type: ignore[attr-defined]
        states = saved.get("callbacks") or {}
        for callback in finetuning_callbacks(module.trainer):
            if callback.state_key in states:
                callback.load_state_dict(copy.deepcopy(states[callback.state_key]))
                base_finetuning(callback).on_fit_start(callback, module.trainer, module)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint, when the one that was saved after it is whole."""
        self._checkpoints.store.remove(str(filepath))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """`load_checkpoint` has done it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """`load_checkpoint` has done it."""
        for callback in finetuning_callbacks(self.lightning_module.trainer):  # type: ignore[attr-defined]
            callback._restarting = False

    def _own_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {str(i): each for i, each in enumerate(self.optimizers)}  # type: ignore[attr-defined]


def base_finetuning(callback: Any) -> Any:
    """Lightning's ``BaseFinetuning``, of the namespace that a callback comes from; or None."""
    return next((c for c in type(callback).__mro__ if c.__name__ == "BaseFinetuning"), None)


def finetuning_callbacks(trainer: Any) -> list[Any]:
    """The callbacks that freeze layers, and add groups to optimizers when they thaw them."""
    return [each for each in trainer.callbacks if base_finetuning(each) is not None]


def check_states(trainer: Any) -> None:
    """Say now what a sealed checkpoint of this Trainer could not keep, not when the first is saved.

    ``on_save_checkpoint`` of the module is called once for that, with an empty ``state_dict``. If
    it wants what is there in training only, what it adds is left for the first save.

    Raises:
        CheckpointValueError: a state could only be pickled; a hyper-parameter like that is a
            warning.
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
    except Exception:  # noqa: BLE001  it may want what is there in training only
        return {}
    return {key: value for key, value in checkpoint.items() if key != "state_dict"}


def _state_of(stateful: Any) -> Any:
    try:
        return stateful.state_dict()
    except Exception:  # noqa: BLE001  it may have none before training
        return None


def leave_inference_mode(trainer: Any) -> None:
    """Have the evaluation loops use ``no_grad``.

    What is gathered under inference mode cannot be trained on later. Lightning knows that of its
    own FSDP strategy, and of gloo, but not of others on CUDA.
    """
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in (*loops, trainer.predict_loop):
        loop.inference_mode = False


def refuse_callbacks(callbacks: list[Any]) -> None:
    """Raise for callbacks that fail on sharded parameters, before they do.

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
