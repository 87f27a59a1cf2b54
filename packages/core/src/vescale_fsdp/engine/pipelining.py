"""What ``torch.distributed.pipelining`` asks of a sharded stage, beside its state (`fsdp2_state`).

Zero-bubble schedules split a backward: first the gradients of inputs, and later, between other
micro-batches, those of weights. Torch looks for ``stage.parameters()`` in the graph, and sets their
``.grad``. In the graph are the unsharded ones, so a stage gets those (`StageMethods`). Their
gradients come through no hook, and are collected before the reduction.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from vescale_fsdp.engine.unit import unit_of, units_in

_STAGE = "torch.distributed.pipelining.stage"


class StageMethods:
    """A mixin of ``FSDPModule``, for torch's pipelines."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters, as of any module.

        A pipeline stage gets the unsharded ones until its gradients are reduced.
        """
        module = cast(nn.Module, super())
        if torch.compiler.is_compiling():  # it cannot look at frames
            return module.parameters(recurse)
        is_stage = sys._getframe(1).f_globals.get("__name__") == _STAGE
        unit = unit_of(self)  # type: ignore[arg-type]
        if not is_stage or unit is None or unit.requires_gradient_sync:
            return module.parameters(recurse)
        slots = [slot for each in units_in(self).values() for slot in each.slots()]  # type: ignore[arg-type]
        in_graph = {id(slot.sharded): slot.gathered for slot in slots if slot.gathered is not None}
        return (in_graph.get(id(each), each) for each in module.parameters(recurse))
