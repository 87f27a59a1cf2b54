"""Runs a step of a copy of a model, and follows its events and the memory of its activations.

Usually the copy is on the meta device: its tensors have shapes and autograd, but no values and no
memory. The units have the engine's own boundary, so the moments of the trace are those at which the
engine unshards and reduces::

    forward 1   forward 2   backward of root   backward 2, its gradients   backward 1, its gradients

`vescale_fsdp_tune.costs` adds the buffers of the engine to this, moment by moment. What autograd
makes for a parameter counts as an activation until its gradient is complete; then the engine has
it.

Recomputation and offload are as in ``fully_shard(activations=...)``, of all units but the root.
On meta a condition on values is an error, except ``mask.all()`` and ``mask.sum() == mask.numel()``,
which are true: transformers asks whether all tokens belong to one sequence. There attention is
fused, as on devices (`attention`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale_fsdp.errors import PlanError
from vescale_fsdp.spi import Call, Kept, current_backward, devices, enter, leave, map_tensors
from vescale_fsdp_tune.budget.attention import fused_attention
from vescale_fsdp_tune.budget.describe import owners
from vescale_fsdp_tune.budget.offloaded import CountedOffload
from vescale_fsdp_tune.budget.recorder import Recorder
from vescale_fsdp_tune.budget.twins import cast, seed_generators
from vescale_fsdp_tune.costs.model import Event, Model, Trace
from vescale_fsdp_tune.costs.problem import BlockTimes
from vescale_fsdp_tune.costs.settings import Activations

LossOf = Callable[[Any], torch.Tensor]
_RANDOM_STATE_BYTES = 5056  # of torch's generator on the CPU, which a recomputed forward saves


def loss_of(output: Any) -> torch.Tensor:
    """Return ``.loss`` of an output, else the sum of its first tensor that requires a gradient.

    Raises:
        PlanError: there is no tensor.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        found: list[torch.Tensor] = []
        map_tensors(lambda tensor: found.append(tensor) or tensor, output)  # type: ignore[func-returns-value]
        if not found:
            raise PlanError(f"forward returned a {type(output).__name__} without tensors")
        loss = next((each for each in found if each.requires_grad), found[0])
    return loss.sum() if loss.dim() else loss


@dataclass(frozen=True)
class Job:
    """A step of a copy of a model.

    Attributes:
        module: the copy, on meta or on a device. Its parameters have the dtypes of compute.
        blocks: of the copy: the units but the root, in forward order.
        model: describes both.
        args, kwargs: of forward, on the same device.
        dtype: that floating-point inputs of units are cast to; None: they are not.
        output_dtype: that floating-point outputs of the root are cast to; None: they are not.
        loss_of: from the output of forward.
    """

    module: nn.Module
    blocks: Sequence[nn.Module]
    model: Model
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype | None
    output_dtype: torch.dtype | None = None
    loss_of: LossOf = field(default=loss_of)

    @property
    def device(self) -> torch.device:
        """Of the copy."""
        return next(self.module.parameters()).device

    def run(self) -> torch.Tensor:
        """Run forward and backward, and return the loss. What the model prints goes to stderr."""
        seed_generators()
        with redirect_stdout(sys.stderr), torch.enable_grad():
            loss = self.loss_of(self.module(*self.args, **self.kwargs))
            if loss.requires_grad:
                torch.autograd.backward([loss])  # as a method it would suspend function modes
        return loss


def trace_of(
    job: Job,
    activations: Activations = "keep",
    *,
    has_host: bool,
    sees: Callable[[int, Any], None] | None = None,
) -> Trace:
    """Run a step, and return its events and activations.

    See `trace_and_reads`.
    """
    return trace_and_reads(job, activations, has_host=has_host, sees=sees)[0]


def trace_and_reads(
    job: Job,
    activations: Activations = "keep",
    *,
    has_host: bool,
    sees: Callable[[int, Any], None] | None = None,
) -> tuple[Trace, set[int]]:
    """Run a step. Returns its trace, and the blocks that cannot be units.

    They have parameters that are read outside of their forward, where the engine would have
    resharded them; or they are not called.

    Args:
        activations: what is kept between forward and backward.
        has_host: whether the devices have a host, to which activations can be offloaded.
        sees: called with the index of a block and what it has returned, after each of its calls.
    """
    owner = owners(job.module, job.blocks)
    homes = {
        param.untyped_storage()._cdata: owner[id(param)] + 1
        for param in job.module.parameters()
        if owner[id(param)] >= 0
    }
    recorder = Recorder((job.args, job.kwargs), job.module, homes)
    offload = None
    if "offload" in activations and has_host:
        offload = CountedOffload(job.device, recorder.stays)
    is_meta = job.device.type == "meta"
    fused = fused_attention(is_accelerator=has_host) if is_meta else nullcontext()
    recomputes = "recompute" in activations
    with (
        _hooked(job, recorder, offload, recomputes=recomputes, saves_state=not has_host, sees=sees),
        fused,
        recorder,
    ):
        loss = job.run()  # it is there until the end
        recorder.note(Event.END)
        del loss
    host_bytes = 0 if offload is None else offload.highest_bytes
    called = {moment.unit for moment in recorder.moments if moment.event is Event.FORWARD}
    unfit = recorder.read_outside | set(range(1, 1 + len(job.blocks))) - called
    return Trace(tuple(recorder.moments), host_bytes), {number - 1 for number in unfit}


def seconds_of(job: Job) -> list[BlockTimes]:
    """Run a step on a device, and return the times of each unit.

    The root is first. Times of other units are not in its times. Recomputation was not tried, and
    counts as a forward.
    """
    clock = _Clock(job.device, 1 + len(job.blocks))
    with _hooked(job, clock, None, recomputes=False):
        job.run()
        clock.note(Event.END)
    return [BlockTimes(unit[0], unit[1], unit[0]) for unit in clock.seconds]


class Notes(Protocol):
    """Notes the events of a step."""

    running: list[int]

    def note(self, event: Event, unit: int = 0, call: int = 0, **more: Any) -> None:
        """An event has happened."""

    def hand_over(self, gradient: torch.Tensor) -> None:
        """A gradient is complete."""


class _Clock:
    """Adds the time between events to that of the innermost unit that runs."""

    def __init__(self, device: torch.device, num_units: int) -> None:
        self._device = device
        self.running: list[int] = []
        self._running: list[tuple[int, bool]] = []  # units, and whether in backward
        self._last = time.perf_counter()
        self.seconds = [[0.0, 0.0] for _ in range(num_units)]

    def note(self, event: Event, unit: int = 0, call: int = 0, **more: Any) -> None:
        if event is Event.GRADIENT:
            return
        devices.synchronize(self._device)
        now = time.perf_counter()
        if self._running:
            index, is_backward = self._running[-1]
            self.seconds[index][is_backward] += now - self._last
        elif event is not Event.FORWARD:  # of the root's loss and its backward
            self.seconds[0][1] += now - self._last
        self._last = now
        if event in (Event.FORWARD, Event.BACKWARD):
            self._running.append((unit, event is Event.BACKWARD))
        elif event is not Event.END and self._running:
            self._running = [each for each in self._running if each[0] != unit]

    def hand_over(self, gradient: torch.Tensor) -> None: ...


class _Call(Call):
    """One forward of a unit."""

    def __init__(self, notes: Notes, unit: int, number: int) -> None:
        super().__init__(f"unit {unit}")
        self._notes, self.unit, self.number = notes, unit, number
        self.kept: Kept | None = None  # activations that are offloaded
        self._has_begun = False  # its backward

    def note(self, event: Event, **more: Any) -> None:
        self._notes.note(event, self.unit, self.number, **more)

    def pre_backward(self, is_plain: bool | None = None) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self.note(Event.BACKWARD)
        if self.kept is not None:
            self.kept.prefetch()

    def post_backward(self) -> None:
        if self.kept is not None:
            self.kept.finish()
        self.note(Event.END_OF_BACKWARD)


@contextmanager
def _hooked(
    job: Job,
    notes: Notes,
    offload: CountedOffload | None,
    *,
    recomputes: bool,
    saves_state: bool = False,
    sees: Callable[[int, Any], None] | None = None,
) -> Iterator[None]:
    """Give the module's units the hooks of a trace."""
    units = [job.module, *job.blocks]
    handles: list[Any] = _gradient_hooks(job.model, units, notes)
    numbers = iter(range(1 << 62))
    for index, unit in enumerate(units):
        is_block = index > 0
        hooks = _UnitHooks(index, job, notes, offload if is_block else None, numbers, sees)
        handles.append(unit.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True))
        handles.append(unit.register_forward_hook(hooks.after))
        if is_block and recomputes:
            num_bytes = _RANDOM_STATE_BYTES if saves_state else 0
            unit.forward = _Recomputed(unit.forward, job.device, num_bytes)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for block in job.blocks if recomputes else ():
            del block.forward


class _Recomputed:
    """A forward whose activations are recomputed.

    Generators have no state on the meta device, so a tensor takes the place of it.

    Args:
        num_bytes: of the state that each call saves.
    """

    def __init__(self, forward: Callable[..., Any], device: torch.device, num_bytes: int) -> None:
        self._forward, self._device, self._num_bytes = forward, device, num_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)

        def run(*args: Any, **kwargs: Any) -> Any:
            _ = state  # it is there until the backward has recomputed this
            return self._forward(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class _UnitHooks:
    """The hooks around the forward of one unit."""

    def __init__(
        self,
        index: int,
        job: Job,
        notes: Notes,
        offload: CountedOffload | None,
        numbers: Iterator[int],
        sees: Callable[[int, Any], None] | None,
    ) -> None:
        self._index, self._job, self._notes = index, job, notes
        self._offload, self._numbers, self._sees = offload, numbers, sees
        self._depth = 0
        self._call: _Call | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        is_outer = self._depth == 1 and current_backward() == -1  # else it is recomputed
        if is_outer:
            self._notes.running.append(self._index)
            self._notes.note(Event.FORWARD, self._index, number := next(self._numbers))
        args, kwargs = cast((args, kwargs), self._job.dtype)
        if is_outer:
            self._call = _Call(self._notes, self._index, number)
            args, kwargs = enter(self._call, (args, kwargs))
            if self._offload is not None:
                self._call.kept = self._offload.collect(self._index)
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth or self._call is None:
            return output
        call, self._call = self._call, None
        self._notes.running.remove(self._index)
        if call.kept is not None:
            call.kept.end()
        if self._index == 0:
            output = cast(output, self._job.output_dtype)
        elif self._sees is not None:
            self._sees(self._index - 1, output)
        output, is_reachable = leave(call, output)
        call.note(
            Event.END_OF_FORWARD, takes_gradients=call.takes_gradients, is_reachable=is_reachable
        )
        return output


def _gradient_hooks(model: Model, units: Sequence[nn.Module], notes: Notes) -> list[Any]:
    """Take each parameter's gradient when it is complete, as the engine does."""
    owner = owners(units[0], units[1:])
    handles = []
    for index, unit in enumerate(units):
        groups = model.units[model.order[index]].groups
        places = {tensor.name: i for i, group in enumerate(groups) for tensor in group.tensors}
        for name, param in unit.named_parameters():
            if param.requires_grad and owner[id(param)] == index - 1 and name in places:

                def take(param: torch.Tensor, unit: int = index, place: int = places[name]) -> None:
                    gradient, param.grad = param.grad, None
                    assert gradient is not None, "it has been accumulated"
                    notes.hand_over(gradient)
                    notes.note(Event.GRADIENT, unit, group=place, num_elements=gradient.numel())

                handles.append(param.register_post_accumulate_grad_hook(take))
    return handles
