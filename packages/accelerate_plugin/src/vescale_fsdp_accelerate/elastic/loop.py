"""The loop of ``transformers.Trainer`` in an elastic training.

For one call of ``train``, methods of the Trainer are wrapped, in its instance:

=========================  ====================================================================
``get_train_dataloader``   the loader of this rank's samples; accumulation follows the ranks
``_init_training_state``   prepares the model before, so that the newest state can be restored;
                           then the Trainer finds its step in that state, as in a checkpoint
``_prepare_for_training``  returns what was prepared before
``_run_epoch``             the first one skips the batches that were taken, as after a checkpoint;
                           none is run if the training was stopped early, before a restart
``get_batch_samples``      counts the step before, and saves, before samples of the next are loaded
``compute_loss``           weights the loss, if micro-batches have different sizes
``_finalize_training``     the last state is saved before, because it may load the best model
=========================  ====================================================================
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.data_loader import DataLoaderShard  # type: ignore[import-untyped]
from accelerate.state import GradientState  # type: ignore[import-untyped]

import vescale_fsdp_elastic as elastic
from vescale_fsdp.spi import capture, restorer
from vescale_fsdp_accelerate.elastic.training import elastic_training, take_world

__all__ = ["Loop", "repeated", "within"]

_FILE = "trainer_state.json"
_GLOBAL_BATCH = "global_batch"  # in the marks of a run
_SET = (  # arguments that this file sets, and gives back
    "gradient_accumulation_steps",
    "restore_callback_states_from_checkpoint",
    "eval_on_start",
)
_WRAPPED = (
    "get_train_dataloader",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "get_batch_samples",
    "compute_loss",
    "_finalize_training",
)


@contextmanager
def within(trainer: Any, callback: Any) -> Iterator[None]:
    """Make one call of the Trainer's loop elastic.

    Args:
        callback: the `ElasticCallback` that asks for it.

    Raises:
        ValueError: the Trainer has something that does not work with a number of ranks that
            changes; says what to change.
    """
    args = trainer.args
    _check(trainer)
    loop = Loop(trainer, callback)
    before = {name: getattr(args, name) for name in _SET}
    own = {name: vars(trainer)[name] for name in _WRAPPED if name in vars(trainer)}
    for name in _WRAPPED:
        setattr(trainer, name, getattr(loop, name.removeprefix("_")))
    callback.loop = loop
    try:
        yield
    except BaseException as error:
        loop.close(error)
        raise
    else:
        loop.close(None)
    finally:
        callback.loop = None
        for name, value in before.items():
            setattr(args, name, value)
        for name in _WRAPPED:
            delattr(trainer, name)
        vars(trainer).update(own)


class Loop:
    """One call of the Trainer's loop.

    Args:
        trainer: not yet wrapped.
        callback: with the options.
    """

    def __init__(self, trainer: Any, callback: Any) -> None:
        self._trainer, self._callback = trainer, callback
        self._stock: dict[str, Callable[..., Any]] = {
            name: getattr(trainer, name) for name in _WRAPPED
        }
        self._options: elastic.ElasticOptions = callback.options
        self._loader: elastic.StepLoader | None = None
        self._weights: list[float] = []
        self._number = 0  # of the micro-batch in its step
        self._first_step = 0  # of the epoch
        self._has_begun = False
        self._prepared: Any = None
        self._context: Any = None
        self._set_random: Callable[[], None] | None = None

    # In place of the Trainer's methods

    def get_train_dataloader(self) -> elastic.StepLoader:
        """Return the loader of this rank's micro-batches."""
        trainer, args = self._trainer, self._trainer.args
        made = elastic.StepLoader.like(
            self._stock["get_train_dataloader"](),
            self._options.global_batch,
            args.process_index,
            args.world_size,
            lambda: self._first_step,
            micro_batch=trainer._train_batch_size,
            default_seed=args.seed if args.data_seed is None else args.data_seed,
            accepted=(DataLoaderShard,),
        )
        self._weights = made.micro_batches.weights()
        args.gradient_accumulation_steps = made.micro_batches.num_each
        counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        if 0 in self._weights and counts:
            raise ValueError(
                f"global_batch={self._options.global_batch} has fewer samples than the "
                f"{args.world_size} ranks have micro-batches ({len(self._weights)} each), and the "
                "loss is a mean over tokens, for which none may be empty: set a larger "
                "per_device_train_batch_size or global_batch"
            )
        self._loader = made
        return made

    def init_training_state(
        self, max_steps: int, steps: int, epochs: int, resume: Any, trial: Any
    ) -> Any:
        """Restore the newest state, and return the epoch and the batch with which it continues."""
        trainer = self._trainer
        self._prepared = self._stock["_prepare_for_training"](max_steps, self._loader, resume)
        self._restore()
        stock, run = self._stock["_init_training_state"], self._callback.run
        if run.source == "start":
            return stock(max_steps, steps, epochs, resume, trial)
        trainer.args.restore_callback_states_from_checkpoint = True
        trainer.args.eval_on_start = False  # its result is in the state, and callbacks count it
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / _FILE).write_text(run.extra["trainer"])
            return stock(max_steps, steps, epochs, folder, trial)

    def prepare_for_training(self, *_: Any) -> Any:
        """Return what `init_training_state` has prepared."""
        return self._prepared

    def run_epoch(self, *, epoch: int, **options: Any) -> None:
        """Run an epoch, or what is left of it."""
        trainer = self._trainer
        if not self._has_begun:
            self._has_begun = True
            if self._callback.run.is_left(trainer.state.max_steps):
                trainer.control.should_training_stop = True  # transformers has set it back
                return
        self._first_step = epoch * options["num_update_steps_per_epoch"]
        if self._callback.run.source != "start" and epoch == options["epochs_trained"]:
            options["resume_from_checkpoint"] = str(self._options.directory)
        self._stock["_run_epoch"](epoch=epoch, **options)

    def get_batch_samples(self, *args: Any) -> Any:
        """Count the step before, and return the micro-batches of the next one.

        All that belongs to the step before is done: its evaluation, for example. Random numbers
        that are drawn while samples are loaded belong to the next one.
        """
        if self._set_random is not None:  # numbers may have been drawn since
            self._set_random()
            self._set_random = None
        self._number = 0
        run = self._callback.run
        if self._trainer.state.global_step > run.step:
            run.made(self._options.global_batch)
        return self._stock["get_batch_samples"](*args)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss with the weight of the micro-batch.

        A mean over the tokens of the global batch, which the Trainer divides by
        ``num_items_in_batch``, has the right weight already.
        """
        found = self._stock["compute_loss"](model, inputs, *args, **kwargs)
        if not model.training:
            return found
        weight = self._weights[self._number % len(self._weights)]
        self._number += 1
        if weight == 1.0 or kwargs.get("num_items_in_batch") is not None:
            return found
        return (found[0] * weight, *found[1:]) if isinstance(found, tuple) else found * weight

    def finalize_training(self, *args: Any) -> Any:
        """Save the last state on disk, then let the Trainer load the best model. Collective."""
        run, trainer = self._callback.run, self._trainer
        trainer.store_flos()  # it is in the state
        if trainer.state.global_step > run.step:
            run.made(self._options.global_batch, is_last=True)
        else:
            run.end()
        return self._stock["_finalize_training"](*args)

    # What the callback hears of

    def begin(self) -> None:
        """Count from the Trainer's step: of another checkpoint, if `train` got its path."""
        self._callback.run.step = self._trainer.state.global_step

    def close(self, error: BaseException | None) -> None:
        """Leave the context."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None if error is None else type(error), error, None)

    def _restore(self) -> None:
        trainer = self._trainer
        self._context = elastic_training(
            trainer.accelerator,
            self._options.directory,
            {"schedule": trainer.lr_scheduler},
            self._options.arguments(),
        )
        run = self._callback.run = self._context.__enter__()
        self._check_global_batch()
        run.before_save = self._dump
        if run.source != "start":
            self._set_random = restorer(capture())

    def _check_global_batch(self) -> None:
        """Raise if it has changed: the Trainer finds its place in the data by the step."""
        run, own = self._callback.run, self._options.global_batch
        before = run.marks.setdefault(_GLOBAL_BATCH, own)
        if own != before:
            raise ValueError(
                f"global_batch={own} does not work with the run in {self._options.directory}, "
                f"which has made {run.step} steps with global_batch={before}: its place in the "
                f"data follows from both. Set global_batch={before}, or name another directory "
                "for a new run"
            )

    def _dump(self) -> None:
        """Put the Trainer's state into what is saved, as its checkpoints have it."""
        trainer = self._trainer
        exportable = [
            each
            for each in [*trainer.callback_handler.callbacks, trainer.control]
            if hasattr(each, "state") and hasattr(each, "from_state")
        ]
        state = dataclasses.replace(trainer.state, stateful_callbacks=exportable)
        self._callback.run.extra["trainer"] = json.dumps(dataclasses.asdict(state))


def _check(trainer: Any) -> None:
    """Raise for what does not work with a number of ranks that changes."""
    args = trainer.args
    if not hasattr(trainer, "_run_epoch"):
        raise RuntimeError("ElasticCallback needs transformers 5.20 or later")
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} does not work with "
            "ElasticCallback, which divides the samples of a step itself, by its global_batch: "
            "leave it out"
        )
    if not args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices=False does not work with ElasticCallback: means of "
            "losses would depend on the number of ranks; leave it out"
        )
    if args.ignore_data_skip:
        raise ValueError(
            "ignore_data_skip=True does not work with ElasticCallback: after each restart, samples "
            "that were taken would be taken again; leave it out"
        )
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True does not work with ElasticCallback")


def _end(trainer: Any) -> None:
    """End what a call of the loop had begun, and what the next one would go on with."""
    vars(trainer).pop("_eval_dataloaders", None)  # those with persistent workers
    trainer.current_flos = 0  # of steps that come again
    GradientState().dataloader_references = [None]  # of an evaluation that was broken off


def _take_world(trainer: Any) -> None:
    """Let the Trainer know the ranks. If it is the main process now, its callbacks log."""
    was_main = trainer.is_world_process_zero()
    take_world(trainer.accelerator)
    if was_main or not trainer.is_world_process_zero():
        return
    for callback in trainer.callback_handler.callbacks:
        if vars(callback).get("_initialized"):  # of loggers: for them only the main process counts
            callback._initialized = False


def repeated(trainer: Any, callback: Any, train: Callable[[], Any]) -> Any:
    """Run the Trainer's loop, elastic, and again whenever ranks have come or gone."""

    def attempt() -> Any:
        with within(trainer, callback):
            return train()

    return elastic.repeat(attempt, lambda _: _end(trainer), lambda: _take_world(trainer))
