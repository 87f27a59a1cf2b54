"""`Elastic`: what a strategy with ``elastic=`` holds, and passes the Trainer's calls on to."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.data import DistributedSampler

import vescale_fsdp_elastic as elastic
from vescale_fsdp.spi import forget_stages
from vescale_fsdp_lightning.elastic.fit import Fit
from vescale_fsdp_lightning.elastic.progress import COUNTS

__all__ = ["Elastic"]

_T = TypeVar("_T")


class Elastic:
    """The elastic trainings of a strategy: one for each ``Trainer.fit``.

    It is a launcher, too, for processes that torchrun has started: it calls ``fit`` again after a
    loss.

    Args:
        strategy: that holds it.

    Attributes:
        fit: the one under way.
    """

    is_interactive_compatible = True  # it starts no process

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.fit: Fit | None = None
        self._last_counts: dict[str, int] | None = None  # of the last `fit`, for checkpoints after

    # Processes

    def launch(
        self, function: Callable[..., _T], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> _T:
        """Call the function: a method of the Trainer, which makes or keeps the model."""
        del trainer
        return elastic.repeat(lambda: function(*args, **kwargs), self._end_fit, self._take_world)

    def kill(self, signum: int) -> None:
        """Do nothing: torchrun ends the processes that it has started."""

    def init_process_group(
        self, backend: str | None, limit: timedelta | None, **options: Any
    ) -> None:
        """Make the default group. Ranks that connect have the user's ``limit``, if there is one."""
        if limit is not None:
            options["connect_timeout_s"] = limit.total_seconds()
        elif os.environ.get("VESCALE_FSDP_MEETING"):
            del options["timeout"]  # ranks that meet have a shorter one
        elastic.init_process_group(backend, **options)

    def rank_of(self, rank: int) -> int:
        """The rank by which Lightning decides who logs and writes files."""
        # If others are in a training, they do so already, and no rank here shall begin to.
        return max(rank, 1) if elastic.is_apart() else rank

    def _end_fit(self, error: Exception) -> None:
        """End what a ``fit`` had begun that is repeated. Does not wait for other ranks."""
        strategy, module = self._strategy, self._strategy.lightning_module
        trainer = module.trainer
        strategy.drop_copy()
        # First: Lightning's handler of SIGTERM sends a message to all ranks.
        trainer._signal_connector.teardown()
        self.close(error)
        strategy._checkpoints.store.leave()
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
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        if scaler is not None:
            forget_stages(scaler)
        module._current_fx_name = None  # else that of the hook in which the rank was lost
        # As ``Trainer.fit`` does.
        trainer.training, trainer.should_stop = True, False

    def _take_world(self) -> None:
        """Forget the former ranks. ``setup_environment`` asks for those of the next world."""
        self._strategy._device_mesh = None
        trainer = self._strategy.lightning_module.trainer
        # Loaders that the user keeps, and a CombinedLoader, which Lightning changes in place.
        combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
        for loader in () if combined is None else combined.flattened:
            follow_ranks(getattr(loader, "sampler", None))
        if dist.get_rank() == 0:
            for logger in trainer.loggers:
                keep_metrics(logger)

    # One fit

    def prepare(self, trainer: Any) -> None:
        """Begin a training. Before the model is sharded: a budget counts the micro-batches."""
        self.fit = Fit(self._strategy.options.elastic, trainer)
        self.fit.prepare()

    def divide(self, loader: Any) -> Any:
        """Return the loader of this rank's samples."""
        is_training = self.fit is not None and self._strategy.lightning_module.trainer.training
        return self.fit.divide(loader) if self.fit is not None and is_training else loader

    def begin_batch(self) -> None:
        """Count the step before: this is the first call after it and what follows it."""
        if self.fit is not None and self._strategy.lightning_module.trainer.training:
            self.fit.begin_batch()

    @property
    def weight(self) -> float:
        """The factor of the loss of the batch under way."""
        return 1.0 if self.fit is None else self.fit.weight

    @property
    def is_dumping(self) -> bool:
        """Whether a state is taken: its tensors are sharded, whatever other checkpoints have."""
        return self.fit is not None and self.fit.is_dumping

    def with_counts(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a dictionary of a checkpoint with what its counters mean, for `Fit.adopt`."""
        counts = self._last_counts if self.fit is None else self.fit.counts()
        return checkpoint if counts is None else {**checkpoint, COUNTS: counts}

    def end(self) -> None:
        """Save the last state of a training, also if it has not begun: all steps had been made."""
        if self.fit is not None:
            self._last_counts = self.fit.counts()
            self.fit.end()
            self.fit = None

    def close(self, error: BaseException) -> None:
        """Leave a training after an error."""
        ended, self.fit = self.fit, None
        if ended is not None:
            ended.close(error)


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
