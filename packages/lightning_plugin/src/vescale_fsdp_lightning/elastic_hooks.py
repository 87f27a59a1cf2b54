"""The methods of the strategy for the Trainer that serve elastic training."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DistributedSampler

import vescale_fsdp_elastic as elastic
from vescale_fsdp.checkpoint import full
from vescale_fsdp_elastic import repeating, worlds
from vescale_fsdp_elastic.meeting import MEETING
from vescale_fsdp_elastic.regroup import forget_stages
from vescale_fsdp_lightning.elastic import Elastic
from vescale_fsdp_lightning.progress import COUNTS
from vescale_fsdp_lightning.sharding import DEFAULT_TIMEOUT, Sharding

__all__ = ["ElasticHooks"]

_T = TypeVar("_T")


class ElasticHooks(Sharding):
    """`Sharding` that passes what the Trainer calls on to `Elastic`, if the user has asked."""

    _elastic: Elastic | None = None  # of the `fit` under way
    _last_counts: dict[str, int] | None = None  # of the last `fit`, for checkpoints after it
    _launcher: Any
    precision_plugin: Any
    lightning_module: Any
    model: Any

    @property
    def elastic_run(self) -> elastic.Run | None:
        """The elastic training of the ``fit`` under way: its attempt, source and costs."""
        return None if self._elastic is None else self._elastic.run

    # Processes

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._launcher is None and self.options.elastic is not None:
            self._launcher = _Repeater(self)

    def _init_process_group(self, backend: str | None, **options: Any) -> None:
        if self.options.elastic is None:
            super()._init_process_group(backend, **options)
            return
        if self._timeout is not None and self._timeout is not DEFAULT_TIMEOUT:  # the user's
            options["connect_timeout_s"] = self._timeout.total_seconds()
        elif os.environ.get(MEETING):
            del options["timeout"]  # ranks that meet have a shorter one
        elastic.init_process_group(backend, **options)

    def _set_world_ranks(self) -> None:
        super()._set_world_ranks()
        if self.options.elastic is not None and worlds.is_apart():
            # Others log and write files already: no rank here shall begin to.
            rank_zero_only.rank = max(self.global_rank, 1)  # type: ignore[attr-defined]

    def end_fit(self, error: Exception) -> None:
        """End what a ``fit`` had begun that is repeated. Does not wait for other ranks."""
        module, trainer = self.lightning_module, self.lightning_module.trainer
        # First: Lightning's handler of SIGTERM sends a message to all ranks.
        trainer._signal_connector.teardown()
        self._close_elastic(error)
        self._checkpoints.store.leave()
        trainer.fit_loop.teardown()  # workers of loaders, among others
        # A new process would not have what follows, and no state that is restored sets it.
        epochs = trainer.fit_loop.epoch_loop
        for results in (epochs._results, epochs.val_loop._results):
            results.reset()
        if "torchmetrics" in sys.modules:
            for child in module.modules():
                if isinstance(child, sys.modules["torchmetrics"].Metric):
                    child.reset()
        for callback in trainer.checkpoint_callbacks:
            callback._defer_save_until_validation = False
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            forget_stages(scaler)
        module._current_fx_name = None  # else that of the hook in which the rank was lost
        # As ``Trainer.fit`` does.
        trainer.training, trainer.should_stop = True, False

    def take_world(self) -> None:
        """Forget the former ranks. ``setup_environment`` asks for those of the next world."""
        self._device_mesh = None
        trainer = self.lightning_module.trainer
        # Loaders that the user keeps, and a CombinedLoader, which Lightning changes in place.
        combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
        for loader in () if combined is None else combined.flattened:
            follow_ranks(getattr(loader, "sampler", None))
        if dist.get_rank() == 0:
            for logger in trainer.loggers:
                keep_metrics(logger)

    # The loop

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader of this rank's samples."""
        made = super().process_dataloader(dataloader)  # type: ignore[misc]
        is_divided = self._elastic is not None and self.lightning_module.trainer.training
        return self._elastic.divide(made) if self._elastic and is_divided else made

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call backward, on the loss with the weight of its micro-batch."""
        weight = 1.0 if self._elastic is None else self._elastic.weight
        return super().backward(loss if weight == 1.0 else loss * weight, *args, **kwargs)  # type: ignore[misc]

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch. It is the first that the Trainer calls after a step and what follows it."""
        if self._elastic is not None and self.lightning_module.trainer.training:
            self._elastic.begin_batch()
        return super().batch_to_device(batch, *args, **kwargs)  # type: ignore[misc]

    def on_train_start(self) -> None:
        """Begin where the restored state is."""
        super().on_train_start()  # type: ignore[misc]
        if self._elastic is not None:
            self._elastic.start()

    def on_train_end(self) -> None:
        """Save the last state."""
        super().on_train_end()  # type: ignore[misc]
        self._end_elastic()

    def on_exception(self, exception: BaseException) -> None:
        """Leave what is under way."""
        super().on_exception(exception)  # type: ignore[misc]
        self._close_elastic(exception)

    def _close_elastic(self, error: BaseException) -> None:
        ended, self._elastic = self._elastic, None
        if ended is not None:
            ended.close(error)

    def _with_counts(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a dictionary of a checkpoint with what its counters mean, for `Elastic.adopt`."""
        counts = self._last_counts if self._elastic is None else self._elastic.counts()
        return checkpoint if counts is None else {**checkpoint, COUNTS: counts}

    def _end_elastic(self) -> None:
        """End a training that has not begun, because all its steps had been made before."""
        if self._elastic is not None:
            self._last_counts = self._elastic.counts()
            self._elastic.end()
            self._elastic = None

    # While a state is taken, its tensors are sharded, whatever the format of other checkpoints.

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


def follow_ranks(sampler: Any) -> None:
    """Let a ``DistributedSampler`` divide its samples among the ranks that there are now."""
    if isinstance(sampler, DistributedSampler):
        epoch, rank, size = sampler.epoch, dist.get_rank(), dist.get_world_size()
        options = {name: getattr(sampler, name) for name in ("shuffle", "seed", "drop_last")}
        DistributedSampler.__init__(sampler, sampler.dataset, size, rank, **options)
        sampler.set_epoch(epoch)


def keep_metrics(logger: Any) -> None:
    """Rename what another process has logged, if this process is to log there from now on.

    A ``CSVLogger`` of Lightning deletes it when it begins. ``metrics.csv`` becomes
    ``metrics.1.csv``.
    """
    is_csv = any(cls.__name__ == "CSVLogger" for cls in type(logger).__mro__)
    if not is_csv or logger._experiment is not None:
        return
    place, files = f"{logger.log_dir}/metrics", logger._fs
    if files.isfile(f"{place}.csv"):
        number = next(n for n in itertools.count(1) if not files.exists(f"{place}.{n}.csv"))
        files.mv(f"{place}.csv", f"{place}.{number}.csv")


class _Repeater:
    """A launcher for processes that torchrun has started: it calls ``fit`` again after a loss.

    Args:
        strategy: that the Trainer asks for it.
    """

    is_interactive_compatible = True  # it starts no process

    def __init__(self, strategy: ElasticHooks) -> None:
        self._strategy = strategy

    def launch(
        self, function: Callable[..., _T], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> _T:
        """Call the function: a method of the Trainer, which makes or keeps the model."""
        del trainer
        strategy = self._strategy
        return repeating.repeat(
            lambda: function(*args, **kwargs), strategy.end_fit, strategy.take_world
        )

    def kill(self, signum: int) -> None:
        """Do nothing: torchrun ends the processes that it has started."""
