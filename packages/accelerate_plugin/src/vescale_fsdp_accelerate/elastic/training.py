"""Training that goes on when ranks come and go, with all that an accelerator has prepared."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

import vescale_fsdp_elastic as elastic
from vescale_fsdp_accelerate.replacing import Replacement

__all__ = ["elastic_training", "take_world"]

_log = logging.getLogger(__name__)


@contextmanager
def elastic_training(
    accelerator: Any, directory: Any, stateful: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> Iterator[elastic.Run]:
    """`vescale_fsdp_elastic.training` with the prepared and the registered objects.

    Raises:
        ValueError: not one model has been prepared, or the accelerator divides losses by a number
            of accumulations.
    """
    _check(accelerator)
    others = {f"schedule.{i}": each for i, each in enumerate(accelerator._schedulers)}
    others |= {f"registered.{i}": each for i, each in enumerate(accelerator._custom_objects)}
    if accelerator.scaler is not None:
        others["scaler"] = accelerator.scaler
    after = options.get("after_regroup")

    def after_regroup() -> None:
        take_world(accelerator)
        _start_trackers(accelerator)
        if after is not None:
            after()

    with (
        steps_once(accelerator),
        elastic.training(
            directory,
            accelerator._models[0],
            named_optimizers(accelerator._optimizers),
            stateful={**others, **(stateful or {})},
            **{**options, "after_regroup": after_regroup},
        ) as run,
    ):
        if accelerator.scaler is not None:
            _scale_losses(run, accelerator.scaler)
        yield run


def _scale_losses(run: elastic.Run, scaler: Any) -> None:
    """Let `Step.backward` scale the gradient, as ``accelerator.backward`` does in fp16."""
    stock = run.batches

    def batches(*args: Any, **options: Any) -> Iterator[elastic.Step]:
        for step in stock(*args, **options):
            step.backward = partial(backward, step.backward)  # type: ignore[method-assign]
            yield step

    def backward(step_backward: Callable[[Tensor], None], loss: Tensor) -> None:
        own = loss.float().clone()  # the scaled gradient may be too large for fp16
        own.register_hook(scaler.scale)
        step_backward(own)

    run.batches = batches  # type: ignore[method-assign]


def _check(accelerator: Any) -> None:
    num_models, accumulates = len(accelerator._models), accelerator.gradient_accumulation_steps
    if num_models != 1:
        raise ValueError(
            f"elastic training needs one prepared model, and {num_models} have been prepared: "
            "join them in one nn.Module"
        )
    if accumulates != 1:
        raise ValueError(
            f"gradient_accumulation_steps={accumulates} does not work with elastic_training, which "
            "divides the samples of a step itself, by its micro_batch: accelerator.backward would "
            f"divide the gradient by {accumulates} once more. Leave it out, in the Accelerator or "
            "its GradientAccumulationPlugin, and in the yaml"
        )


def take_world(accelerator: Any) -> None:
    """Let the accelerator know the rank and the number of ranks, for gathers and the main one."""
    from accelerate import PartialState  # type: ignore[import-untyped]

    for state in (PartialState(), accelerator.state):  # the second has copies of the first's values
        state.num_processes, state.process_index = dist.get_world_size(), dist.get_rank()


def _start_trackers(accelerator: Any) -> None:
    """Start the trackers if this process has become the main one: they exist only there."""
    arguments = accelerator.tracker_arguments
    if arguments is None or accelerator.trackers or not accelerator.is_main_process:
        return
    try:
        accelerator.init_trackers(*arguments)
    except Exception as error:  # noqa: BLE001  # else each next main process would be lost too
        accelerator.trackers = []
        _log.warning(
            "rank 0 is another process now, and its trackers do not start, so accelerator.log "
            "writes nothing: %s: %s",
            type(error).__name__, error,
        )  # fmt: skip


def named_optimizers(prepared: Any) -> dict[str, Any]:
    """Return the users' optimizers, or those that replace them, by their numbers."""
    plain = [getattr(each, "optimizer", each) for each in prepared]
    inner = [each.inner if isinstance(each, Replacement) else each for each in plain]
    return {str(number): each for number, each in enumerate(inner)}


@contextmanager
def steps_once(accelerator: Any) -> Iterator[None]:
    """Let prepared schedulers step once for each step of the optimizer.

    Accelerate's step them as often as there are processes, so that schedules would depend on it.
    """
    before = [(each, each.split_batches) for each in accelerator._schedulers]
    for each, _ in before:
        each.split_batches = True
    try:
        yield
    finally:
        for each, was in before:
            each.split_batches = was
