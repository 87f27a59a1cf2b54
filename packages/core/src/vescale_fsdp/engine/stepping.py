"""Backwards and optimizer steps inside of a forward, as in a Lightning ``training_step``.

The unit around stays unsharded, because the rest of its forward may use its parameters::

    forward     modules have the unsharded parameters, and so has ``parameters()``
    backward    gradients are reduced; ``parameters()`` yields the sharded ones, which have them
    step        what is out of date is gathered again, for the rest of the forward

In FSDP2 the backward reshards the unit, or it goes on with the weights before the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from vescale_fsdp.engine.unit import Unit
from vescale_fsdp.engine.writers import expose_if_written
from vescale_fsdp.program import Lease

_running: list[weakref.ref[Unit]] = []  # units whose forward runs, outermost first


def begin_forward(unit: Unit) -> None:
    """The forward of ``unit`` begins, outside of a backward."""
    _running.append(weakref.ref(unit))
    for group in unit.groups:
        group.is_in_forward = True


def end_forward(unit: Unit) -> None:
    """It has ended, perhaps by an exception."""
    _running[:] = [ref for ref in _running if ref() is not unit]
    for group in unit.groups:
        group.is_in_forward = False


def units_in_forward() -> Iterator[Unit]:
    """The units whose forward runs, outermost first."""
    units = (ref() for ref in _running)
    return (unit for unit in units if unit is not None and unit.running.has_begun)


def units_after_backward() -> Iterator[Unit]:
    """Those of which a backward has ended inside of the forward."""
    return (unit for unit in units_in_forward() if unit.engine and unit.engine.is_after_backward)


def unshard_again(unit: Unit) -> None:
    """Unshard, in its forward, what a write to the shards has outdated. Collective."""
    if unit.is_stale:
        unit.refresh()
    unit.unshard()
    unit.leases.add(Lease.FORWARD)
    expose_if_written(unit)


def _follow_step(*_: Any) -> None:
    """Cost: an all-gather of each unit whose forward runs, on each rank."""
    for unit in units_in_forward():
        if unit.is_stale:
            unshard_again(unit)
            unit.expose()
            unit.tell_writes_apart()


register_optimizer_step_post_hook(_follow_step)
