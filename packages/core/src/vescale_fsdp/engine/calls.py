"""Calls: what happens around the forward of a unit, and when its backward comes back.

The events of a step, for a unit in the middle of the model::

    pre_forward    wait for the all-gather, register the unsharded parameters, start the next one
    post_forward   reshard (unless kept), put the boundary around the outputs
    pre_backward   unshard again, start the all-gather of the unit before this one
    post_backward  all gradients of the unit are in: reshard, reduce

A unit may be entered again while it runs (``training_step`` calls ``self(x)``): the inner call
is part of the outer one. It may be called several times before a backward, and in an activation
checkpoint's recomputation inside of one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import plain_tensors
from vescale_fsdp.engine import boundary
from vescale_fsdp.engine.buffers import broadcast_buffers
from vescale_fsdp.engine.engine import Engine, engine_of
from vescale_fsdp.engine.root import make_root
from vescale_fsdp.engine.tree import map_tensors
from vescale_fsdp.engine.unit import Unit, units_in
from vescale_fsdp.program.residency import Lease


class _Call(boundary.Call):
    """One forward of a unit that a backward may come back to."""

    def __init__(self, unit: Unit, engine: Engine) -> None:
        super().__init__(unit.fqn)
        self.pass_number = engine.passes.num_passes
        self._unit, self._engine = unit, engine

    def pre_backward(self) -> None:
        self._unit.enter_backward(self)
        with plain_tensors():
            self._engine.before_backward(self._unit)

    def post_backward(self) -> None:
        if self._unit.leave_backward(self):  # else another call is to come, and adds to gradients
            with plain_tensors():
                self._engine.after_backward(self._unit)


def pre_forward(
    unit: Unit,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: str = "forward",
) -> Any:
    """What happens before the forward of one of the unit's modules; returns its arguments."""
    running = unit.running
    running.depth += 1
    if running.depth == 1:
        running.handled = sys.exception()
    engine = engine_of(unit)
    if engine is None:  # who is called first becomes the root
        with plain_tensors():
            engine = make_root(unit)
    if len(unit.module_refs) > 1 and running.depth == 1:
        if not running.modules_left:
            running.modules_left = {id(ref()) for ref in unit.module_refs}
        running.modules_left.discard(id(module))
    if running.depth > 1:
        if unit.is_stale:  # an optimizer has stepped, or somebody has written to the shards
            unit.refresh()
        unit.unshard()
        unit.leases.add(Lease.FORWARD)
        return _cast_inputs(unit, (args, kwargs))
    if Lease.BACKWARD in unit.leases and compat.current_backward() != -1:
        # An activation checkpoint runs the forward again.
        unit.unshard()
        return _cast_inputs(unit, (args, kwargs))
    wants_gradients = torch.is_grad_enabled()
    if unit.broadcasts_buffers and unit.is_root:
        if unit.buffers_are_due:
            broadcast_buffers(module, [g.axes for u in engine.units() for g in u.groups])
        unit.buffers_are_due = wants_gradients and unit.requires_gradient_sync
    with plain_tensors():
        engine.before_forward(unit, method, wants_gradients)
    running.has_begun = True
    unit.leases.discard(Lease.USER)
    unit.leases.add(Lease.FORWARD)
    args, kwargs = _cast_inputs(unit, (args, kwargs))
    if not torch.is_grad_enabled():
        return args, kwargs
    # Whether a backward comes back is known from the outputs: frozen parameters too are needed
    # again, for the gradients of the inputs and of what comes before them in the unit.
    call = running.call = _Call(unit, engine)
    args, kwargs = boundary.enter(call, (args, kwargs))
    unit.open_calls.add(call)
    return args, kwargs


def post_forward(unit: Unit, output: Any) -> Any:
    """What happens after it, also when it raised (``output`` is None then)."""
    running = unit.running
    running.depth = max(running.depth - 1, 0)
    if running.depth:
        return _cast_output(unit, output)
    call, running.call = running.call, None
    has_begun, running.has_begun = running.has_begun, False
    if has_begun:
        reachable = True
        if call is not None:
            output, reachable = boundary.leave(call, output)
        engine = engine_of(unit)
        assert engine is not None, "pre_forward made it"
        # Without a tensor to come back through, a backward could not unshard them again.
        strays = call is not None and not reachable and _may_get_gradients(unit, call)
        with plain_tensors():
            engine.after_forward(
                unit,
                has_more=bool(running.modules_left),
                strays=strays,
                # Hooks that run after an exception see it as the one that is being handled.
                has_failed=sys.exception() is not running.handled,
                is_closed=call is not None and not call.takes_gradients,
                is_visited=call is not None and reachable,
                is_hidden=call is None or strays,
            )
    unit.leases.discard(Lease.FORWARD)
    running.handled = None
    return _cast_output(unit, output)


def _may_get_gradients(unit: Unit, call: boundary.Call) -> bool:
    """Whether a call may be part of a graph: by its inputs, or by parameters in the unit."""
    below = (each for module in unit.modules() for each in units_in(module).values())
    return call.takes_gradients or any(each.trainable for each in below)


def _cast_inputs(unit: Unit, value: Any) -> Any:
    dtype = unit.mp_policy.param_dtype
    if dtype is None or not unit.mp_policy.cast_forward_inputs:
        return value
    return map_tensors(lambda tensor: _cast(tensor, dtype), value)


def _cast_output(unit: Unit, output: Any) -> Any:
    dtype = unit.mp_policy.output_dtype
    return output if dtype is None else map_tensors(lambda tensor: _cast(tensor, dtype), output)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
