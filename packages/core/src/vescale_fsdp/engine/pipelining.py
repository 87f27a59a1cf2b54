"""What ``torch.distributed.pipelining`` asks of a sharded stage, by private names of FSDP2.

A stage runs its micro-batches without synchronization, and reduces gradients itself at the end. For
this it calls ``fully_shard.state(module)``, torch's or ours, and uses three attributes of the
result (torch/distributed/pipelining/stage.py, ``perform_reduce_grad``).

Zero-bubble schedules split a backward: first the gradients of inputs, and later, between other
micro-batches, those of weights. Torch looks for ``stage.parameters()`` in the graph, and sets their
``.grad``. In the graph are the unsharded ones, so a stage gets those (`StageMethods`). Their
gradients come through no hook, and are collected before the reduction.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from vescale_fsdp import compat
from vescale_fsdp.engine import hooks
from vescale_fsdp.engine.engine import engine_of
from vescale_fsdp.engine.unit import Unit, unit_of, units_in

_STAGE = "torch.distributed.pipelining.stage"


class StageMethods:
    """A mixin of ``FSDPModule``, for torch's pipelines."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters, as of any module.

        A pipeline stage gets the unsharded ones until its gradients are reduced.
        """
        module = cast(nn.Module, super())
        is_stage = sys._getframe(1).f_globals.get("__name__") == _STAGE
        unit = unit_of(self)  # type: ignore[arg-type]
        if not is_stage or unit is None or unit.requires_gradient_sync:
            return module.parameters(recurse)
        slots = [slot for each in units_in(self).values() for slot in each.slots()]  # type: ignore[arg-type]
        in_graph = {id(slot.sharded): slot.gathered for slot in slots if slot.gathered is not None}
        return (in_graph.get(id(each), each) for each in module.parameters(recurse))


class _ParamGroup:
    """Takes the place of FSDP2's parameter group."""

    def post_backward(self) -> None:
        """Do nothing: `State._root_post_backward_final_callback` reduces all units in order."""


@dataclass(frozen=True)
class State:
    """A unit under the attribute names of FSDP2's state."""

    unit: Unit

    @property
    def _fsdp_param_groups(self) -> list[_ParamGroup]:
        return [_ParamGroup() for _ in self.unit.groups]

    @property
    def _state_ctx(self) -> SimpleNamespace:
        engine = engine_of(self.unit)
        units = [self.unit] if engine is None else engine.units()
        return SimpleNamespace(all_states=[State(unit) for unit in units])

    # Torch's own ``register_fsdp_forward_method`` calls these two before and after a method.

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return hooks.pre_forward(self.unit, module, args, kwargs, "a method")

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return hooks.post_forward(self.unit, output)

    def _root_post_backward_final_callback(self) -> None:
        """Reduce and publish the gradients that backwards without synchronization accumulated."""
        engine = engine_of(self.unit)
        if engine is not None:
            for unit in engine.units():
                for group in unit.groups:
                    group.collect_gradients()
            engine.reduce_waiting()


def register_state(module: nn.Module, unit: Unit) -> None:
    """Let torch's own ``fully_shard.state(module)`` return the state, for pipelining."""
    compat.set_fsdp2_state(module, State(unit))


def state_of(module: nn.Module) -> State | None:
    """``fully_shard.state(module)``: the state of a module; None for one that is not sharded."""
    unit = unit_of(module)
    return None if unit is None else State(unit)
