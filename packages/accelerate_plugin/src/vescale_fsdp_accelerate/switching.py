"""Optimizers that were made before their model was sharded, moved to the sharded parameters.

A parameter is known by its identity, and by its name in the model: both before and after. So any
number of models can be prepared, tied parameters stay tied, and an optimizer may come before its
model, with it, or after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from vescale_fsdp.checkpoint import full
from vescale_fsdp.optim import AdamW8bit, OptimizerGroup, Shampoo

__all__ = ["Switch", "granularities_of", "is_ours"]


class Switch:
    """Knows which sharded parameter has taken the place of which."""

    def __init__(self) -> None:
        # Weak: what no optimizer holds is freed as soon as it is sharded.
        self._sharded: Any = WeakIdKeyDictionary()

    def record(self, model: nn.Module, last: dict[str, Any]) -> None:
        """Note what became of ``last``, weak references by names, and bring it up to date.

        A tied parameter may change its place twice: with its own unit, and with that of all its
        uses.
        """
        for name, now in model.named_parameters(remove_duplicate=False):
            old = last[name]() if name in last else None
            if old is not None and old is not now:
                self._sharded[old] = now
            last[name] = weakref.ref(now)

    def _now(self, param: torch.Tensor) -> torch.Tensor:
        while param in self._sharded:
            param = self._sharded[param]
        return param

    def move(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Give optimizers the sharded parameters, and their states the same cuts.

        No communication: each process takes its part of a state that is whole.
        """
        for optimizer in optimizers:
            if isinstance(optimizer, OptimizerGroup):
                self.move(optimizer.optimizers.values())
            elif any(p in self._sharded for g in optimizer.param_groups for p in g["params"]):
                if is_ours(optimizer):  # states are made with the parameters
                    self._remake(optimizer)
                else:
                    self._exchange(optimizer)

    def _exchange(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                new = self._now(old)
                if new is old:
                    continue
                group["params"][index] = new
                if old in optimizer.state:
                    states = optimizer.state.pop(old)
                    optimizer.state[new] = {
                        key: full.part_of(value, new, key) if _is_cut(key, value, new) else value
                        for key, value in states.items()
                    }

    def _remake(self, optimizer: torch.optim.Optimizer) -> None:
        saved = optimizer.state_dict()
        has_stepped = any(
            bool(value.item() if isinstance(value, torch.Tensor) else value)
            for states in saved["state"].values()
            for key, value in states.items()
            if key == "step"
        )
        groups = list(optimizer.param_groups)
        optimizer.param_groups.clear()
        optimizer.state.clear()
        for group in groups:
            # The same dict: schedulers and users may hold it.
            names = group.pop("param_names", None)
            params = [self._now(old) for old in group["params"]]
            group["params"] = params if names is None else list(zip(names, params, strict=True))
            optimizer.add_param_group(group)
        if has_stepped:
            optimizer.load_state_dict(saved)


def _is_cut(name: str, value: Any, param: torch.Tensor) -> bool:
    """Whether a whole state is to be cut as its parameter is: it has an entry for each element.

    Of a parameter without dimensions that is not to be seen from its shape; there, as torch does
    when it loads states, all are but ``step``.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return value.shape == param.shape and (value.dim() > 0 or name != "step")


def is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of `vescale_fsdp.optim`."""
    return type(optimizer).__module__.startswith("vescale_fsdp.")


def granularities_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What must not be cut for an optimizer that was made before its model was sharded."""
    if isinstance(optimizer, OptimizerGroup):
        return [need for each in optimizer.optimizers.values() for need in granularities_of(each)]
    needs: list[Any] = []
    for group in optimizer.param_groups:
        if isinstance(optimizer, AdamW8bit):
            size = group["min_8bit_size"]
            needs.append(AdamW8bit.granularity(group["block_size"], min_8bit_size=size))
        elif isinstance(optimizer, Shampoo) and group["mode"] == "local":
            needs.append(Shampoo.granularity(group["block_size"]))
    return needs
