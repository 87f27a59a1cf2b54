"""The gradient shards of a rank in one flat buffer in host memory, for the sum over replicas.

Two buffers take turns: while the sum of a step is made in one, the other has the sum of the step
before, for a member that has missed it. The gradients themselves are not changed until the sum is
complete, so that it can be repeated with other members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vescale_fsdp import compat

_NUMBERS = 3  # samples, loss, wishes


@dataclass
class Summand:
    """A flat buffer and the numbers that are summed with it.

    Attributes:
        data: the gradient shards, one after the other.
        numbers: samples, loss, wishes; then for each parameter on how many replicas it has a
            gradient.
    """

    data: torch.Tensor
    numbers: torch.Tensor


class Gradients:
    """The gradients of a model's trainable parameters on this rank.

    Cost: two buffers of the size of the gradient shards, in host memory; fp32, or fp64 if a
    parameter has that.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._params = [param for _, param in named]
        self._sizes = [compat.local_tensor(param).numel() for param in self._params]
        wide = any(param.dtype == torch.float64 for param in self._params)
        dtype = torch.float64 if wide else torch.float32
        self._slots = [
            Summand(
                torch.zeros(sum(self._sizes), dtype=dtype),
                torch.zeros(_NUMBERS + len(self._params), dtype=torch.float64),
            )
            for _ in range(2)
        ]
        text = repr([(name, size) for (name, _), size in zip(named, self._sizes, strict=True)])
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def slot(self, step: int) -> Summand:
        """The buffer of a step. It is that of the step before the last one, too."""
        return self._slots[step % 2]

    def pack(self, step: int, numbers: Sequence[float]) -> Summand:
        """Copy the gradients into the buffer of this step. A missing one counts as zeros."""
        slot = self.slot(step)
        slot.numbers[:_NUMBERS] = torch.tensor(numbers, dtype=torch.float64)
        own = [param.grad for param in self._params]
        slot.numbers[_NUMBERS:] = torch.tensor([float(grad is not None) for grad in own])
        locals_, views = [], []
        for view, grad in zip(slot.data.split(self._sizes), own, strict=True):
            if grad is None:
                view.zero_()
            else:
                locals_.append(compat.local_tensor(grad).view(-1))
                views.append(view)
        if views:
            torch._foreach_copy_(views, locals_)
        return slot

    def unpack(self, step: int, factor: float) -> None:
        """Set the gradients to the sum times ``factor``.

        A parameter that has a gradient on another replica only gets one here.
        """
        slot = self.slot(step)
        used = slot.numbers[_NUMBERS:].tolist()
        locals_, views = [], []
        for param, view, count in zip(
            self._params, slot.data.split(self._sizes), used, strict=True
        ):
            if not count:
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            locals_.append(compat.local_tensor(param.grad).view(-1))
            views.append(view)
        if locals_:
            torch._foreach_copy_(locals_, views)
            if factor != 1.0:
                torch._foreach_mul_(locals_, factor)


def numbers_of(summand: Summand) -> list[float]:
    """Return samples, loss and wishes."""
    numbers: list[float] = summand.numbers[:_NUMBERS].tolist()
    return numbers
