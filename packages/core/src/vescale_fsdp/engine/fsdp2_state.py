"""The state of a sharded module, under the private names of FSDP2's that other projects use.

=========================================  ======================================================
``_fsdp_param_group.mesh_info``            sizes and groups of the mesh, for clipping
``...post_forward_mesh_info``              whether it is resharded after forward: dinov3, verl
``_lazy_init()``                           dinov3; the first forward does it here
``_mp_policy``                             fairseq2
``_state_ctx.all_states``                  the units of the model: pipelines, NeMo Automodel
``..._fsdp_param_group.post_backward()``   torch.distributed.pipelining, NeMo Automodel
``_root_post_backward_final_callback()``   the same two
``_comm_ctx``                              pipelines of torch 2.15 ask whether two share one
``_pre_forward``, ``_post_forward``        torch's ``register_fsdp_forward_method``
=========================================  ======================================================

A stage of a pipeline runs its micro-batches without synchronization, and reduces gradients itself
at the end (torch/distributed/pipelining/stage.py, ``perform_reduce_grad``).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp import compat
from vescale_fsdp.engine import hooks
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.engine import engine_of
from vescale_fsdp.engine.unit import Unit, unit_of


@dataclass(unsafe_hash=True)  # others keep these in sets
class ParamGroup:
    """A group of a unit, in place of FSDP2's ``FSDPParamGroup``."""

    unit: Unit
    axes: Axes

    @property
    def mesh_info(self) -> Any:
        """Torch's ``FSDPMeshInfo``, ``HSDPMeshInfo`` or ``DDPMeshInfo``."""
        return compat.mesh_info(self.axes.mesh, self.axes.shard, self.axes.replicate)

    @property
    def post_forward_mesh_info(self) -> Any:
        """That of its mesh; None: it is not resharded after forward.

        To set it to None or to something else calls ``set_reshard_after_forward``.
        """
        return None if self.unit.reshard_after_forward is False else self.mesh_info

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, value: Any) -> None:
        self.unit.reshard_after_forward, self.unit.num_parts = value is not None, 1

    @property
    def reshard_after_backward(self) -> bool:
        """As ``set_reshard_after_backward`` has set it."""
        return self.unit.reshard_after_backward

    @property
    def reduce_grads(self) -> bool:
        """As ``set_requires_gradient_sync`` has set it."""
        return self.unit.requires_gradient_sync

    def post_backward(self) -> None:
        """Do nothing: `State._root_post_backward_final_callback` reduces all units in order."""


@dataclass(unsafe_hash=True)
class State:
    """A unit under the attribute names of FSDP2's state."""

    unit: Unit

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return [ParamGroup(self.unit, group.axes) for group in self.unit.groups]

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self.unit.mp_policy

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return self.unit.reshard_after_forward is None

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, value: bool) -> None:
        if value:
            self.unit.reshard_after_forward = None
        elif self.unit.reshard_after_forward is None:
            self.unit.reshard_after_forward = True

    @property
    def _state_ctx(self) -> SimpleNamespace:
        engine = engine_of(self.unit)
        units = [self.unit] if engine is None else engine.units()
        return SimpleNamespace(all_states=[State(unit) for unit in units])

    @property
    def _comm_ctx(self) -> object:
        """One object for all units of a model."""
        return engine_of(self.unit) or self.unit

    def _lazy_init(self) -> None: ...

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return hooks.pre_forward(self.unit, module, args, kwargs, "a method")

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return hooks.post_forward(self.unit, output)

    def _root_post_backward_final_callback(self) -> None:
        """Reduce and publish the gradients that backwards without synchronization accumulated."""
        engine = engine_of(self.unit)
        if engine is not None:
            engine.reduce_waiting()


def register_state(module: nn.Module, unit: Unit) -> None:
    """Let torch's own ``fully_shard.state(module)`` return the state."""
    compat.set_fsdp2_state(module, State(unit))


def state_of(module: nn.Module) -> State | None:
    """``fully_shard.state(module)``: the state of a module; None for one that is not sharded."""
    unit = unit_of(module)
    return None if unit is None else State(unit)
