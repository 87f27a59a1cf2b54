"""What ``torch.distributed.pipelining`` and others ask of an FSDP module beyond its public methods.

A pipeline stage runs its micro-batches without synchronization, and then, by hand, what a backward
does at its end. It reaches for it through ``fully_shard.state(module)``, torch's or ours, and three
names of FSDP2's own state, which `State` offers (torch/distributed/pipelining/stage.py,
``perform_reduce_grad``).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from vescale_fsdp import compat
from vescale_fsdp.engine import calls
from vescale_fsdp.engine.engine import engine_of
from vescale_fsdp.engine.unit import Unit, unit_of


class _ParamGroup:
    """Stands for the groups of a unit."""

    def post_backward(self) -> None:
        """Nothing here: `State._root_post_backward_final_callback` reduces all units in order."""


@dataclass(frozen=True)
class State:
    """A unit, by the names of FSDP2's state."""

    unit: Unit

    @property
    def _fsdp_param_groups(self) -> list[_ParamGroup]:
        return [_ParamGroup() for _ in self.unit.groups]

    @property
    def _state_ctx(self) -> SimpleNamespace:
        engine = engine_of(self.unit)
        units = [self.unit] if engine is None else engine.units()
        return SimpleNamespace(all_states=[State(unit) for unit in units])

    # torch's own ``register_fsdp_forward_method`` calls these two around a method.

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return calls.pre_forward(self.unit, module, args, kwargs, "a method")

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return calls.post_forward(self.unit, output)

    def _root_post_backward_final_callback(self) -> None:
        """Reduce and publish what backwards without synchronization have left."""
        engine = engine_of(self.unit)
        if engine is not None:
            engine.reduce_waiting()


def register_state(module: nn.Module, unit: Unit) -> None:
    """Let torch's own ``fully_shard.state(module)`` find the state: pipelining asks that one."""
    compat.set_fsdp2_state(module, State(unit))


def state_of(module: nn.Module) -> State | None:
    """What ``fully_shard.state(module)`` returns; None for a module that is not sharded."""
    unit = unit_of(module)
    return None if unit is None else State(unit)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Nothing to share: models over the same ranks have the same communicators already.

    Raises:
        ValueError: one of them is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")
