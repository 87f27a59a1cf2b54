"""Slot: one parameter of a group, and every place in the model where it is registered."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.engine.parallel import inner_spec, local_data

__all__ = ["ParamToShard", "Site", "Slot", "local_of"]

Site: TypeAlias = tuple["weakref.ref[nn.Module]", str]  # a module and the name it has there


@dataclass
class Slot:
    """A parameter: the sharded one, the gathered one, and where they are registered."""

    fqn: str
    sites: list[Site]
    shape: torch.Size  # in the buffer: what an inner parallelism leaves on this rank
    spec: DTensorSpec  # of the sharded one
    inner: DTensorSpec | None  # of the parameter before, if it was a DTensor
    sharded: nn.Parameter
    local: torch.Tensor  # the view of the shard that ``sharded`` wraps
    original: weakref.ref[nn.Parameter]  # the parameter before it was sharded
    gathered: nn.Parameter | None = None  # None while the group is on meta
    used: bool = False  # whether a gradient appeared since the last reduction

    def register(self, param: nn.Parameter) -> None:
        """Make ``param`` the one that the modules hold."""
        for module_ref, name in self.sites:
            module = module_ref()
            if module is not None:
                module._parameters[name] = param

    def registered(self) -> nn.Parameter:
        """The parameter that the modules hold now."""
        module_ref, name = self.sites[0]
        module = module_ref()
        param = None if module is None else module._parameters[name]
        return self.sharded if param is None else param


@dataclass(frozen=True)
class ParamToShard:
    """An original parameter with what the group needs to know of it."""

    fqn: str
    param: nn.Parameter
    sites: list[Site]
    block: int

    @property
    def inner(self) -> DTensorSpec | None:
        """The spec of a parameter that is a DTensor already."""
        return inner_spec(self.param)

    @property
    def data(self) -> torch.Tensor:
        """What this rank has of it to shard."""
        return local_data(self.param)


def local_of(param: torch.Tensor) -> torch.Tensor:
    """The local part of a sharded parameter."""
    local: torch.Tensor = param._local_tensor  # type: ignore[attr-defined]
    return local
