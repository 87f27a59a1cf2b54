"""Runs a model on the meta device, with the inputs of ``--batch`` or ``--inputs``."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vescale_fsdp import repeated_blocks
from vescale_fsdp.cli.text import InputError
from vescale_fsdp.errors import PlanError
from vescale_fsdp.spi import TorchDispatchMode, map_tensors
from vescale_fsdp_tune.budget import TrialJob, arguments_of, cast_parameters, trace_of_trial
from vescale_fsdp_tune.commands.modules import call, reason
from vescale_fsdp_tune.commands.settings import Settings
from vescale_fsdp_tune.costs.model import Model, Trace
from vescale_fsdp_tune.costs.settings import Activations


def trace_of(
    model: Model,
    settings: Settings,
    activations: Activations,
    blocks: Sequence[nn.Module] | None = None,
) -> Trace:
    """Run a step of the model's module, and return its events and activations.

    Args:
        model: its module is on the meta device. Parameters get the compute dtype.
        settings: of the plan: inputs, compute dtype and backend.
        activations: what is kept between forward and backward.
        blocks: the units of the model but the root. None: the repeated blocks.

    Raises:
        InputError: the inputs are wrong, or the model cannot run without values.
    """
    module: nn.Module = model.module
    args, kwargs = inputs_of(model, settings)
    dtype: torch.dtype = getattr(torch, settings.compute_dtype.name)
    cast_parameters(module, dtype)
    blocks = repeated_blocks(module) if blocks is None else blocks
    job = TrialJob(module, blocks, model, args, kwargs, dtype)
    try:  # on CPUs nothing is moved
        return trace_of_trial(job, activations, has_host=settings.backend == "nccl")
    except PlanError as error:
        raise InputError(str(error)) from error
    except Exception as error:  # it is the user's code, or that of transformers
        raise _cannot_run(model, error) from error


def operations_of(model: Model, settings: Settings) -> tuple[int, dict[str, int]]:
    """Return the operations of the matrix products of a forward: of all, and by name of module.

    A multiplication and an addition are two. Attention is counted as if there were no mask.

    Raises:
        InputError: the inputs are wrong, or the model cannot run without values.
    """
    args, kwargs = inputs_of(model, settings)
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), redirect_stdout(sys.stderr), counter, _AllIsTrue():
            model.module(*args, **kwargs)
    except Exception as error:  # it is the user's code, or that of transformers
        raise _cannot_run(model, error) from error
    prefix = f"{type(model.module).__name__}."
    counts = counter.get_flop_counts().items()
    by_module = {
        name.removeprefix(prefix): sum(each.values())
        for name, each in counts
        if name.startswith(prefix)
    }
    return counter.get_total_flops(), by_module


class _AllIsTrue(TorchDispatchMode):
    """``tensor.all()`` is true, as in traces: transformers asks whether a batch is one sequence."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._true: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func is torch.ops.aten._local_scalar_dense.default
        if is_read and any(each is args[0] for each in self._true):
            return True
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.all.default:
            self._true.add(result)
        return result


def _cannot_run(model: Model, error: Exception) -> InputError:
    return InputError(
        f"{model.name} cannot run on the meta device, where tensors have shapes but no values: "
        f"{reason(error)}; leave out --batch and --inputs, or use a function that builds the "
        "model with operators that only need shapes"
    )


def inputs_of(model: Model, settings: Settings) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of forward, on the meta device."""
    if settings.inputs is not None:
        return _from_function(settings.inputs)
    assert settings.batch is not None, "there is a batch or a function"
    known = inspect.signature(model.module.forward).parameters
    if "input_ids" not in known:
        raise InputError(
            f"--batch is for models whose forward takes input_ids; that of {model.name} takes "
            f"{', '.join(known) or 'nothing'}: use --inputs module:function"
        )
    tokens = torch.zeros(settings.batch, dtype=torch.long, device="meta")
    given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return (), {name: value for name, value in given.items() if name in known}


def _from_function(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise InputError(f"--inputs is {name!r}, expected module:function")
    found = map_tensors(lambda tensor: tensor.to("meta"), call(module_name, function_name))
    try:
        return arguments_of(found)
    except ValueError as error:
        raise InputError(f"--inputs {name} returned {error}") from error
