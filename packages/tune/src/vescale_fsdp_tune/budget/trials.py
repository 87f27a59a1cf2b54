"""Tries a model on copies: its activations by traces, and the times of its units.

::

    copy on meta         traces of all kinds of activations, shapes of what blocks return
    copy of the root     its times, inputs of blocks
    copies of blocks     times, one block of each kind

If the forward needs values, or the root does not run with stand-ins, all is measured on a copy of
the whole model on the device. That needs the memory for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp.errors import PlanError, warn_user
from vescale_fsdp.spi import devices, map_tensors, recompute
from vescale_fsdp_tune.budget.blocks import Bench, Inputs, Outputs, kind_of
from vescale_fsdp_tune.budget.describe import describe
from vescale_fsdp_tune.budget.merging import words_of
from vescale_fsdp_tune.budget.request import Budget, arguments_of
from vescale_fsdp_tune.budget.trace import Job, loss_of, seconds_of, trace_and_reads, trace_of
from vescale_fsdp_tune.budget.twins import (
    Values,
    cast_parameters,
    limit_of_integers,
    meta_twin,
    real_twin,
    tensors_of,
    untouched_generators,
)
from vescale_fsdp_tune.costs.model import Model, Trace
from vescale_fsdp_tune.costs.problem import BlockTimes, Division
from vescale_fsdp_tune.costs.settings import Activations

NOTHING = BlockTimes(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Subject:
    """A model to try.

    Attributes:
        module: the user's; it does not change.
        device: of compute.
        policy: dtypes.
        budget: has the inputs.
        ignored: parameters that are not sharded.
    """

    module: nn.Module
    device: torch.device
    policy: MixedPrecisionPolicy
    budget: Budget
    ignored: Collection[nn.Parameter] = ()

    def names_of(self, blocks: Sequence[nn.Module]) -> list[str]:
        """Return the names of modules in the model."""
        names = {id(child): name for name, child in self.module.named_modules()}
        return [names[id(block)] for block in blocks]

    def described(self, module: nn.Module, blocks: Sequence[nn.Module]) -> Model:
        """Describe a copy of the model."""
        ignored = {name for name, param in self._named_parameters() if param in self.ignored}
        ids = {id(p) for name, p in module.named_parameters() if name in ignored}
        return describe(module, blocks, type(self.module).__name__, ignored=frozenset(ids))

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())


def divide(subject: Subject, blocks: Sequence[nn.Module]) -> Division:
    """Try the model with these modules as units. Neither it nor random generators change.

    Modules whose parameters are read outside of their forward are no units, and those neither that
    are not called. Without inputs nobody knows.

    Args:
        blocks: in forward order.

    Raises:
        PlanError: it does not run. The message says why.
    """
    if subject.budget.inputs is None:
        model = subject.described(subject.module, blocks)
        return Division(model, (NOTHING,) * len(model.units))
    _check_forwards(subject.module)
    twin = meta_twin(subject.module)
    twins = [twin.get_submodule(name) for name in subject.names_of(blocks)]
    model = subject.described(twin, twins)
    with untouched_generators(subject.device):
        try:
            outputs, traces, unfit = _traced(subject, twin, twins, model)
            if unfit:
                return divide(subject, _without(blocks, unfit))
            seconds = _timed(subject, blocks, outputs, recomputes="recompute" in traces)
        except Exception as error:  # it is the user's code
            if any(tensor.is_meta for tensor in tensors_of(subject.module)):
                raise PlanError(
                    f"{model.name} does not run on a copy without values, where tensors have "
                    f"shapes only: {words_of(error)}; leave Budget(inputs=) out, or "
                    "make the model on a device, where a whole copy of it can be tried"
                ) from error
            traces, unfit, seconds = _on_device(subject, blocks)
            if unfit:
                return divide(subject, _without(blocks, unfit))
    return Division(model, _of_units(model, seconds), traces)


def _check_forwards(module: nn.Module) -> None:
    """Raise for a function in place of a ``forward``, which a copy would share with the model.

    It calls the forward of the original, whose parameters would get gradients.
    """
    for name, child in module.named_modules():
        is_compiled = hasattr(child, "_orig_mod")  # torch.compile(module), whose copy is whole
        if isinstance(vars(child).get("forward"), FunctionType) and not is_compiled:
            where = f"{type(module).__name__}.{name}" if name else type(module).__name__
            raise PlanError(
                f"fully_shard(budget=...) tries the model on a copy, and the forward of {where} "
                "was replaced by a function, which a copy cannot have for itself; replace it by a "
                "method, as types.MethodType(function, module), or replace it after fully_shard, "
                "or leave Budget(inputs=) out"
            )


def _without(blocks: Sequence[nn.Module], numbers: Collection[int]) -> list[nn.Module]:
    return [block for number, block in enumerate(blocks) if number not in numbers]


def _traces(
    subject: Subject, job: Job, sees: Callable[[int, Any], None] | None = None
) -> tuple[dict[Activations, Trace], set[int]]:
    """Trace a step for each kind of activations that the model can have.

    Returns the traces, and the blocks that cannot be units.
    """
    has_host = devices.has_streams(subject.device)
    kept, unfit = trace_and_reads(job, has_host=has_host, sees=sees)
    traces: dict[Activations, Trace] = {"keep": kept}
    if unfit:
        return traces, unfit
    modes: list[Activations] = []
    if job.blocks and all(recompute.state(block) is None for block in job.blocks):
        modes.append("recompute")
        if "offload" in subject.budget.allow and has_host:
            modes += ["offload", "recompute+offload"]
    for mode in modes:
        try:
            traces[mode] = trace_of(job, mode, has_host=has_host)
        except Exception as error:  # noqa: BLE001  # it is the user's code
            warn_user(
                f"fully_shard(budget=...): activations={mode!r} is no candidate, because a step of "
                f"{type(subject.module).__name__} with it raised {words_of(error)}; "
                "with models of transformers, use_cache=False among the inputs may help"
            )
    return traces, unfit


def _job(subject: Subject, twin: nn.Module, blocks: Sequence[nn.Module], values: Values) -> Job:
    device = next(twin.parameters()).device
    model = subject.described(twin, blocks)
    cast_parameters(twin, subject.policy.param_dtype)
    args, kwargs = _arguments(subject, device, values)
    return Job(
        twin,
        blocks,
        model,
        args,
        kwargs,
        subject.policy.param_dtype,
        subject.policy.output_dtype,
        subject.budget.loss or loss_of,
    )


def _arguments(subject: Subject, device: torch.device, values: Values) -> Any:
    placed: dict[int, torch.Tensor] = {}  # the same tensor may be there twice

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in placed:
            needs_values = tensor.is_meta and device.type != "meta"
            made = torch.empty_like(tensor, device=device) if needs_values else tensor.detach()
            made = values.fill(made) if needs_values else made.to(device)
            placed[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return placed[id(tensor)]

    return map_tensors(place, arguments_of(subject.budget.inputs))


def _traced(
    subject: Subject, twin: nn.Module, blocks: Sequence[nn.Module], model: Model
) -> tuple[list[list[Outputs]], dict[Activations, Trace], set[int]]:
    job = _job(subject, twin, blocks, Values(1))
    outputs: list[list[Outputs]] = [[] for _ in blocks]

    def see(index: int, output: Any) -> None:
        outputs[index].append(Outputs(output))

    return outputs, *_traces(subject, job, see)


def _timed(
    subject: Subject,
    blocks: Sequence[nn.Module],
    outputs: Sequence[Sequence[Outputs]],
    *,
    recomputes: bool,
) -> list[BlockTimes]:
    """Return the times of the root and of each block, by parts."""
    values = Values(limit_of_integers(subject.module))
    bench = Bench(subject.device, subject.policy, values)
    given = Inputs(*_arguments(subject, subject.device, values))
    loss = subject.budget.loss or loss_of
    root, inputs = bench.root(subject.module, blocks, outputs, given, loss)
    known: dict[Hashable, BlockTimes] = {}
    found = [root]
    for block, calls, called_with in zip(blocks, outputs, inputs, strict=True):
        if called_with is None:
            found.append(NOTHING)
            continue
        key = kind_of(block), called_with.kind
        if key not in known:
            known[key] = bench.block(block, called_with, recomputes=recomputes)
        found.append(known[key].times(len(calls)))
    return found


def _on_device(
    subject: Subject, blocks: Sequence[nn.Module]
) -> tuple[dict[Activations, Trace], set[int], list[BlockTimes]]:
    """Run a copy of the whole model."""
    values = Values(limit_of_integers(subject.module))
    twin = real_twin(subject.module, subject.device, values)
    twins = [twin.get_submodule(name) for name in subject.names_of(blocks)]
    try:
        job = _job(subject, twin, twins, values)
        traces, unfit = _traces(subject, job)
        seconds = seconds_of(job)
    except Exception as error:  # it is the user's code, or memory
        raise PlanError(
            f"a step of a copy of {type(subject.module).__name__} on {subject.device} with the "
            f"inputs of the budget failed: {words_of(error)}; pass the arguments of "
            "one forward as Budget(inputs=...), or leave them out"
        ) from error
    return traces, unfit, seconds


def _of_units(model: Model, seconds: Sequence[BlockTimes]) -> tuple[BlockTimes, ...]:
    """Return the mean times of each different unit."""
    members: Mapping[int, list[BlockTimes]] = {index: [] for index in range(len(model.units))}
    for index, each in zip(model.order, seconds, strict=True):
        members[index].append(each)
    return tuple(BlockTimes.mean(found) for found in members.values())
