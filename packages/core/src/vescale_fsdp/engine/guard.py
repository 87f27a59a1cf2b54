"""Guard: nobody reads a group's unsharded parameters after they are freed, and no write is lost.

Autograd saves unsharded parameters, and compares their versions when a backward reads them. While
they have no memory their versions are raised, so that such a read is torch's error about a tensor
that was "modified by an inplace operation" (at version 1073741824 and more), and never the zeros
that freed pages may hold. When they are unsharded again they get their versions back.

A write to them raises their version too, or, as ``p.data = ...``, gives them other memory.

Versions of sharded parameters do not show every write: fused kernels, and those for lists of
tensors, write without raising them (torch 2.13). Parameters that stay unsharded are out of date
after an optimizer's step, so the steps on sharded parameters in this process are counted.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from vescale_fsdp import compat

FREED = 1 << 30  # added to the versions of parameters that have no memory


class Guard:
    """Watches parameters whose memory comes (`open`) and goes (`close`)."""

    def __init__(self) -> None:
        self._params: tuple[torch.Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._raised: tuple[int, ...] = ()  # what those are while the memory is gone
        self._plain: list[torch.Tensor] = []  # those that have memory of their own
        self._places: list[int] = []  # where it is
        self._closed = False

    def open(self, params: Sequence[torch.Tensor]) -> None:
        """These parameters have their memory now, as they had it when they were closed."""
        same = len(params) == len(self._params) and all(map(operator.is_, params, self._params))
        if self._closed and same:
            compat.set_versions(self._params, self._versions)
        else:
            if not same:
                self._params = tuple(params)
                self._plain = [param for param in params if not compat.is_wrapper(param)]
            self._versions = _versions_of(self._params)
        if not (same and self._is_in_place):  # all have moved together, or none
            self._places = self._places_now()
        self._closed = False

    def close(self) -> None:
        """The memory goes."""
        if self._closed:
            return
        versions = _versions_of(self._params)
        if versions != self._versions or len(self._raised) != len(versions):
            self._versions = versions
            self._raised = tuple([each + FREED for each in versions])
        compat.set_versions(self._params, self._raised)
        self._closed = True

    @property
    def saw_move(self) -> bool:
        """Whether one of them was given other memory since they were opened."""
        return not self._closed and self._places_now() != self._places

    @property
    def _is_in_place(self) -> bool:
        return not self._plain or self._plain[0].data_ptr() == self._places[0]

    def _places_now(self) -> list[int]:
        return [param.data_ptr() for param in self._plain]

    @property
    def saw_write(self) -> bool:
        """Whether an operator has written to them since they were opened."""
        return not self._closed and _versions_of(self._params) != self._versions


def _versions_of(params: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple([param._version for param in params])


_num_steps = 0


def num_steps() -> int:
    """Steps so far, of optimizers that have at least one sharded parameter."""
    return _num_steps


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # Others may be on one rank only, where the ranks would then disagree.
    global _num_steps
    params = (param for group in optimizer.param_groups for param in group["params"])
    _num_steps += any(isinstance(param, DTensor) for param in params)


register_optimizer_step_post_hook(_count)
