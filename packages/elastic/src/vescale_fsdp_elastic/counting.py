"""Counts the steps of optimizers, to know whether a step that a loop was left in has been made."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from vescale_fsdp import spi
from vescale_fsdp.spi import Optimizers

_Mark = tuple["weakref.ref[torch.Tensor]", int]  # a gradient, and its version


class StepCounter:
    """Counts the steps of some optimizers until it is closed.

    Cost: a hook on each; with several, a look at their gradients after each step.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        several = optimizers.values() if isinstance(optimizers, Mapping) else [optimizers]
        self._optimizers = [each for each in several if each is not None]
        self._counts = [0] * len(self._optimizers)
        # By id of the parameter: the gradient that the last step has used, if it is still there.
        self._used: list[dict[int, _Mark]] = [{} for _ in self._optimizers]
        self._hooks = [
            each.register_step_post_hook(partial(self._add, index))
            for index, each in enumerate(self._optimizers)
        ]

    @property
    def counts(self) -> Sequence[int]:
        """The steps of each."""
        return tuple(self._counts)

    def is_one_awaited(self, since: Sequence[int], unreduced: set[int]) -> bool:
        """Whether one that has made no step since has parameters whose gradients it has not used.

        Args:
            since: `counts`, then.
            unreduced: ids of parameters that get gradients of earlier backwards.
        """
        return any(
            id(param) in unreduced or not self._is_used(index, param)
            for index, optimizer in enumerate(self._optimizers)
            if self._counts[index] == since[index]
            for param in _parameters(optimizer)
        )

    def _is_used(self, index: int, param: torch.Tensor) -> bool:
        if param.grad is None:
            return True
        mark = self._used[index].get(id(param))
        return mark is not None and mark[0]() is param.grad and mark[1] == _version(param.grad)

    def _add(self, index: int, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._counts[index] += 1
        if len(self._optimizers) > 1:
            self._used[index] = {
                id(param): (weakref.ref(param.grad), _version(param.grad))
                for param in _parameters(self._optimizers[index])
                if param.grad is not None
            }

    def close(self) -> None:
        """Take the hooks away."""
        for each in self._hooks:
            each.remove()


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _version(gradient: torch.Tensor) -> int:
    return spi.local_tensor(gradient)._version
