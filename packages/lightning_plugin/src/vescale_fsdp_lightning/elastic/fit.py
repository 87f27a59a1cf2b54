"""Training that goes on when ranks come and go: `vescale_fsdp_elastic` in Lightning's loop.

::

    Trainer.fit
      setup             the loader is divided, and the newest state restored (`prepare`, `restore`)
      each batch        before it, if the batch before was the last of a step: `begin_batch` counts
                        the step, and saves if it is time
        backward        the loss is weighted, if micro-batches have different sizes
      on_train_end      the last state is saved on disk (`end`)

A state is Lightning's dictionary of a checkpoint, without the tensors of model and optimizers,
which are saved beside it. It is taken before a batch is counted. So all that belongs to the step
before is in it: its validation, and what schedulers and callbacks made of that. The batch has been
loaded by then. Its random numbers are drawn again, because those of the state are from before.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch

import vescale_fsdp_elastic as elastic
from vescale_fsdp.spi import capture, model_state, restore, restorer
from vescale_fsdp_lightning.checkpoints import OptimizerStates, without_states
from vescale_fsdp_lightning.elastic.loader import Loader
from vescale_fsdp_lightning.elastic.progress import COUNTS, Counts, as_after_a_batch, with_counts
from vescale_fsdp_lightning.places import agree
from vescale_fsdp_lightning.plain import from_plain, to_plain

__all__ = ["Fit"]

_log = logging.getLogger(__name__)

_DIVIDES = "which divides the samples of each step itself, by its global_batch"
# Arguments of the Trainer, and why they do not work.
_REFUSED = {
    "accumulate_grad_batches": _DIVIDES,
    "overfit_batches": _DIVIDES,
    "reload_dataloaders_every_n_epochs": "whose order of samples belongs to one loader",
    "fast_dev_run": "whose next run would continue from its steps",
}


class Fit:
    """The elastic training of one ``Trainer.fit``.

    Args:
        options: of the user.
        trainer: whose strategy is `VeScaleFSDPStrategy`.
    """

    def __init__(self, options: elastic.ElasticOptions, trainer: Any) -> None:
        self._options, self._trainer = options, trainer
        self._loader: Loader | None = None
        self._weights: list[float] = []
        self._num_steps = 0  # of an epoch
        self._num_samples = 0  # that earlier steps have taken
        self._user_set: list[tuple[Any, str, Any]] = []  # object, name, value before `_set`
        self._context: AbstractContextManager[elastic.Run] | None = None
        self.run: elastic.Run | None = None  # while training
        self._set_random: Callable[[], None] | None = None  # to the restored state
        self._random_before: dict[str, Any] = {}  # the state before the batch was loaded
        self._random_after: dict[str, Any] = {}  # while a state is saved: that after it was loaded
        self.loaded: dict[str, Any] | None = None  # Lightning's dictionary, if there was a state
        self.is_dumping = False
        self._at_batch = True  # else at the end of the training

    # Before training

    def prepare(self) -> None:
        """Divide the loader, and let the Trainer's accumulation follow. Before optimizers are made.

        Raises:
            ValueError, TypeError, NotImplementedError: the Trainer has something that does not
                work with a number of ranks that changes; says what to change.
        """
        trainer = self._trainer
        _check(trainer)
        connector = trainer._accelerator_connector
        # Lightning's own sampler would hide whether the user's loader shuffles.
        was, connector.use_distributed_sampler = connector.use_distributed_sampler, False
        try:
            trainer.fit_loop.setup_data()
        finally:
            connector.use_distributed_sampler = was
        if self._loader is None or trainer.train_dataloader is not self._loader:
            raise TypeError(
                "elastic training needs one torch.utils.data.DataLoader as train_dataloader, got "
                f"{type(trainer.train_dataloader).__name__}"
            )

    def divide(self, loader: Any) -> Loader:
        """Return the loader of this rank's micro-batches, and set what the Trainer counts."""
        trainer = self._trainer
        kwargs = trainer.strategy.distributed_sampler_kwargs
        workers = None
        if int(os.environ.get("PL_SEED_WORKERS", "0")):
            workers = trainer.strategy._utilities("seed").pl_worker_init_function
        made = Loader.like(
            loader,
            self._options.global_batch,
            kwargs["rank"],
            kwargs["num_replicas"],
            lambda: int(trainer.global_step),
            default_seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
            worker_init_fn=workers,
        )
        assert isinstance(made, Loader), "it is made by its class"
        made.before_batch = self.before_batch
        batches = made.micro_batches
        self._weights = batches.weights()
        self._set(trainer, "accumulate_grad_batches", batches.num_each)
        self._count_steps(batches.num_steps, batches.num_each)
        self._loader = made
        return made

    def _count_steps(self, num_steps: int, num_each: int) -> None:
        """Let the Trainer's limits, which count batches, follow the user's, which count steps."""
        trainer = self._trainer
        limit, interval = trainer.limit_train_batches, trainer.val_check_interval
        if isinstance(limit, int):
            num_steps = min(num_steps, limit)
        else:
            num_steps = max(int(num_steps * limit), 1)
        self._num_steps = num_steps
        if limit != 1.0 or isinstance(limit, int):
            self._set(trainer, "limit_train_batches", num_steps * num_each)
        if isinstance(interval, float) and interval != 1.0:
            interval = max(int(num_steps * interval), 1)
        if isinstance(interval, int):
            is_in_epoch = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches
            if is_in_epoch and interval > num_steps:
                raise ValueError(
                    f"Trainer(val_check_interval={interval}) counts optimizer steps in an elastic "
                    f"training, and an epoch has {num_steps}: give at most {num_steps}, or "
                    "check_val_every_n_epoch=None, which counts the steps of all epochs"
                )
            self._set(trainer, "val_check_interval", interval * num_each)

    def _set(self, of: Any, name: str, value: Any) -> None:
        self._user_set.append((of, name, getattr(of, name)))
        setattr(of, name, value)

    def restore(self, model: Any, optimizers: Any) -> None:
        """Load the newest state, if there is one. Lightning then restores its part. Collective."""
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step":  # Lightning counts batches, the user counts steps
                self._set(config, "frequency", config.frequency * len(self._weights))
        self._context = elastic.training(
            self._options.directory, model, optimizers, signals=(), **self._options.arguments()
        )
        run = self.run = self._context.__enter__()
        run.before_save = self._dump
        if run.source == "start":
            return
        self._set_random = restorer(capture())
        loaded: dict[str, Any] = from_plain(run.extra["lightning"])
        self.adopt(loaded, str(self._options.directory))
        self.loaded = loaded
        for callback in self._trainer.checkpoint_callbacks:
            # The state is one after all saves of its step. The next micro-batch has that step too.
            callback._last_global_step_saved = run.step
        if run.extra.get("stopped") == _limits(self._trainer):
            self._trainer.should_stop = True
            if self._trainer.is_global_zero:
                _log.warning(
                    "the training in %s was told to stop by step %s (Trainer.should_stop, which "
                    "EarlyStopping and others set), and so it stops: to go on, change max_epochs, "
                    "max_steps, min_epochs, min_steps or max_time",
                    self._options.directory,
                    run.step,
                )
        connector = self._trainer._logger_connector
        device = self._trainer.strategy.root_device
        for name, value in run.extra["metrics"].items():
            connector._callback_metrics[name] = torch.tensor(value, device=device)
        # What Lightning restores from, without optimizers, as with any checkpoint.
        self._trainer._checkpoint_connector._loaded_checkpoint = self.as_checkpoint()

    def as_checkpoint(self) -> dict[str, Any]:
        """Return Lightning's dictionary for hooks to see. Changes of the states have no effect.

        The tensors of the model are copies of its shards.
        """
        assert self.loaded is not None, "there was a state"
        own = model_state(self._trainer.strategy.model)
        # Not kept: it would hold the shards of a world that has ended.
        return {
            **self.loaded,
            "state_dict": {
                name: each.detach().clone() if isinstance(each, torch.Tensor) else each
                for name, each in own.items()
            },
            "optimizer_states": [OptimizerStates() for _ in self._trainer.optimizers],
        }

    def adopt(self, saved: dict[str, Any], path: str) -> None:
        """Change Lightning's dictionary of a checkpoint to the micro-batches of this training.

        Raises:
            ValueError: see `Counts.of`.
        """
        if "loops" not in saved:  # it has only weights
            return
        own = self._options.global_batch
        before = Counts.of(saved, own, path)
        after = Counts(len(self._weights), own, before.samples)
        saved["loops"] = with_counts(saved["loops"], before, after, self._num_steps)
        self._num_samples = before.samples

    def counts(self) -> dict[str, int] | None:
        """What the counters of the Trainer mean now, to be saved. None if there is no training."""
        run, own = self.run, self._options.global_batch
        if run is None:
            return None
        num_new = self._trainer.global_step - run.step  # 1 if the last step is not counted yet
        samples = run.samples_before(own) + num_new * own
        return asdict(Counts(len(self._weights), own, samples))

    def start(self) -> None:
        """Begin with the loader where the restored state is. After Lightning has restored."""
        run, trainer, loader = self.run, self._trainer, self._loader
        assert run is not None, "restored"
        assert loader is not None, "prepared"
        step, samples = int(trainer.global_step), self._num_samples
        if run.step != step:  # of another checkpoint, because `fit` got its path
            run.move(step, samples)
        loader.begin(step, samples)
        iter(trainer.fit_loop._data_fetcher)
        # Lightning's own handler sends a broadcast from within the handler.
        run.stop_on(signal.SIGTERM)

    # While training

    def before_batch(self) -> None:
        """Before a batch is loaded."""
        if self._set_random is not None:
            self._set_random()  # hooks may have drawn numbers since
            self._set_random = None
            # Else schedulers that wait for a metric would not step at the end of this epoch,
            # because other checkpoints have no metrics.
            self._trainer.fit_loop._restarting = False
        elif self.run is not None and self._trainer.global_step > self.run.step:
            self._random_before = capture()

    def begin_batch(self) -> None:
        """Count the step before, if this batch begins another one. Collective."""
        run = self.run
        if run is not None and self._trainer.global_step > run.step:
            run.made(self._options.global_batch)
            if self._random_after:  # it has saved
                restore(self._random_after)
                self._random_after = {}

    @property
    def weight(self) -> float:
        """The factor of the loss of the batch under way."""
        number: int = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        return self._weights[number % len(self._weights)]

    def _dump(self) -> None:
        """Put Lightning's dictionary into what is saved."""
        trainer, run = self._trainer, self.run
        assert run is not None, "it saves"
        if self._at_batch and not self._random_after:
            self._random_after = capture()
        self.is_dumping = True
        try:
            values = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self.is_dumping = False
        rest: dict[str, Any] = {}
        agree(lambda: rest.update(to_plain(without_states(values))))
        if self._at_batch:
            rest["loops"] = as_after_a_batch(rest["loops"])
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        rest[COUNTS] = self.counts()
        stopped = _limits(trainer) if trainer.should_stop else None
        run.extra.update(lightning=rest, metrics=metrics, stopped=stopped)
        if self._at_batch:
            # The batch under way has been loaded, and will be loaded again from this state: its
            # dataset or collate_fn may draw random numbers. They are saved after this returns.
            restore(self._random_before)

    # After training

    def end(self) -> None:
        """Save the last state on disk. Collective."""
        run = self.run
        assert run is not None, "restored"
        self._at_batch = False
        if self._trainer.global_step > run.step:
            run.made(self._options.global_batch, is_last=True)
        else:
            run.end()
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the context, and give the Trainer the user's arguments back.

        Args:
            error: that has ended the training.
        """
        context, self._context, self.run = self._context, None, None
        for of, name, value in reversed(self._user_set):
            setattr(of, name, value)
        self._user_set = []
        if context is not None:
            context.__exit__(None if error is None else type(error), error, None)


def _limits(trainer: Any) -> dict[str, Any]:
    """Return what the user has said about the end of the training."""
    loop = trainer.fit_loop
    names = ("max_epochs", "max_steps", "min_epochs", "min_steps")
    timers = [
        getattr(callback, "_duration", None)
        for callback in trainer.callbacks
        if any(cls.__name__ == "Timer" for cls in type(callback).__mro__)
    ]
    return {**{name: getattr(loop, name) for name in names}, "seconds": timers}


def _check(trainer: Any) -> None:
    """Raise for what does not work with a number of ranks that changes.

    Raises:
        ValueError, NotImplementedError: says what was found and what to do.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise NotImplementedError(
            "elastic training lets the gradient accumulation follow the number of ranks, and "
            f"{type(module).__name__} has automatic_optimization=False: make its steps automatic, "
            "or write the loop with vescale_fsdp_elastic.training"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise NotImplementedError(
            f"elastic training takes each batch itself, and {type(module).__name__}.training_step "
            "takes a dataloader_iter: give it batch and batch_idx"
        )
    for name in _REFUSED:
        found = getattr(trainer, name)
        if found != (1 if name == "accumulate_grad_batches" else 0):
            raise ValueError(
                f"Trainer({name}={found}) does not work with elastic training, {_REFUSED[name]}: "
                f"leave {name} out"
            )
    for callback in trainer.callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if "LearningRateFinder" in names:  # also that of a Tuner; Lightning refuses BatchSizeFinder
            raise NotImplementedError(
                f"{type(callback).__name__} does not work with elastic training: the steps of its "
                "search would become those of the run. Use it, or the Tuner, with a Trainer "
                "without elastic, and give what it has found to this training"
            )
        if names & {"GradientAccumulationScheduler", "BaseFinetuning"}:
            raise NotImplementedError(
                f"{type(callback).__name__} does not work with elastic training: it changes the "
                "accumulation or the parameters of the optimizers while training; leave it out"
            )
