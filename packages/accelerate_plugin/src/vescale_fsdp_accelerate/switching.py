"""Replaces the parameters of optimizers that were made before their model was sharded.

A parameter's name in the model is the same before and after sharding. It connects the old parameter
with the sharded one. So any number of models can be prepared, tied parameters stay tied, and an
optimizer can be prepared before its model, with it, or after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from vescale_fsdp import replaced_parameters
from vescale_fsdp.checkpoint import full
from vescale_fsdp.errors import warn_user
from vescale_fsdp.optim import AdamW8bit, OptimizerGroup, Shampoo

__all__ = ["Switch", "check_owned", "granularities_of", "is_ours", "warn_of_replaced"]


class Switch:
    """Maps each old parameter to its sharded one."""

    def __init__(self) -> None:
        # Weak keys: an old parameter is freed when it is sharded, unless an optimizer holds it.
        self._sharded: Any = WeakIdKeyDictionary()

    def __reduce__(self) -> Any:
        """Pickle nothing: in another process there are other parameters."""
        return Switch, ()

    def record(self, model: nn.Module, last: dict[str, Any]) -> None:
        """Record which parameter has replaced which, and update ``last``.

        A tied parameter may be replaced twice: for one unit, and for the unit that contains all its
        uses.

        Args:
            last: weak references to the model's parameters before this call, by name.
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
        """Replace the parameters of optimizers by the sharded ones, and shard their states too.

        No communication: each process takes its part of a full state.
        """
        for optimizer in optimizers:
            if isinstance(optimizer, OptimizerGroup):
                self.move(optimizer.optimizers.values())
                continue
            params = [param for group in optimizer.param_groups for param in group["params"]]
            former = [param for param in params if param in self._sharded]
            if former:
                replaced_parameters(former, followed=True)
                if is_ours(optimizer):  # it makes its states when it gets parameters
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
            # Keep the same dict, because schedulers and users may have a reference to it.
            names = group.pop("param_names", None)
            params = [self._now(old) for old in group["params"]]
            group["params"] = params if names is None else list(zip(names, params, strict=True))
            optimizer.add_param_group(group)
        if has_stepped:
            optimizer.load_state_dict(saved)


def _is_cut(name: str, value: Any, param: torch.Tensor) -> bool:
    """Whether to shard a state as its parameter: a full tensor with the parameter's shape.

    For a parameter without dimensions, "step" has the same shape but is not sharded.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return value.shape == param.shape and (value.dim() > 0 or name != "step")


def check_owned(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
    """Raise if an optimizer has no parameter of the models.

    Raises:
        ValueError: nothing would train.
    """
    known = {id(param) for model in models for param in model.parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if params and not any(id(param) in known for param in params):
        raise ValueError(
            f"{type(optimizer).__name__} has {len(params)} parameters, and none of them is one of "
            "the models that were prepared, so that nothing would train. Make the optimizer of "
            "model.parameters(), after the last change of the model"
        )


def warn_of_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Warn if an optimizer has parameters that a call of ``fully_shard`` in the script replaced."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    replaced = replaced_parameters(params)
    if replaced:
        warn_user(
            f"{type(optimizer).__name__} was made before fully_shard: {len(replaced)} of its "
            f"{len(params)} parameters ({replaced[0]!r} is the first) are not those of the model "
            "any more, and are not trained. Make the optimizer after fully_shard, or leave "
            "fully_shard to prepare"
        )


def is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of `vescale_fsdp.optim`."""
    return type(optimizer).__module__.startswith("vescale_fsdp.")


def granularities_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the granularities that an optimizer needs, to shard its model with them."""
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
