"""The gradient shards of a rank in one flat buffer in host memory, for the sum over replicas.

Two buffers take turns: while the sum of a step is made in one, the other has the sum of the step
before, for a member that has missed it. The gradients themselves are not changed until the sum is
complete, so that it can be repeated with other members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from vescale_fsdp import spi
from vescale_fsdp_elastic.hsdp import facts

NUM_STEP = 3  # samples, loss, wishes
_NUM_NUMBERS = NUM_STEP + facts.NUM_NUMBERS


def _size(param: nn.Parameter) -> int:
    return spi.local_tensor(param).numel()


@dataclass
class Summand:
    """A flat buffer and the numbers that are summed with it.

    Attributes:
        params: the trainable parameters of the step.
        data: their gradient shards, one after the other; then for each on how many replicas it has
            a gradient.
        numbers: samples, loss, wishes; then those of `facts`. Their number is always the same.
    """

    params: list[nn.Parameter] = field(default_factory=list)
    data: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    numbers: torch.Tensor = field(
        default_factory=lambda: torch.zeros(_NUM_NUMBERS, dtype=torch.float64)
    )

    @property
    def counts(self) -> torch.Tensor:
        """For each parameter on how many replicas it has a gradient."""
        return self.data[self.data.numel() - len(self.params) :]

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The gradient shard of each parameter."""
        sizes = [_size(param) for param in self.params]
        shards = self.data[: self.data.numel() - len(self.params)]
        views: tuple[torch.Tensor, ...] = shards.split(sizes)
        return views


class Gradients:
    """The gradients of a model's trainable parameters on this rank.

    Which parameters are trainable may change between steps, at the same step in all replicas.

    Cost: two buffers of the size of the gradient shards, in host memory; fp32, or fp64 if a
    parameter has that.

    Attributes:
        digest: of the names, sizes and dtypes of the parameters that are trainable now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._all = list(model.named_parameters())
        self._slots = [Summand(), Summand()]
        self._find_trainable()
        for slot in self._slots:
            self._allocate(slot)

    def _find_trainable(self) -> None:
        named = [(name, param) for name, param in self._all if param.requires_grad]
        self._names, self._params = [name for name, _ in named], [param for _, param in named]
        text = repr([(name, _size(param), str(param.dtype)) for name, param in named])
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def _allocate(self, slot: Summand) -> None:
        wide = any(param.dtype == torch.float64 for param in self._params)
        num_elements = sum(_size(param) for param in self._params) + len(self._params)
        dtype = torch.float64 if wide else torch.float32
        slot.params, slot.data = self._params, torch.empty(0)  # what it had may be freed first
        slot.data = torch.zeros(num_elements, dtype=dtype)

    def slot(self, step: int) -> Summand:
        """The buffer of a step. It is that of the step before the last one, too."""
        return self._slots[step % 2]

    def facts(self, nominal: float) -> facts.Facts:
        """The facts of a step with so many samples, and the parameters that are trainable now."""
        if self._names != [name for name, param in self._all if param.requires_grad]:
            self._find_trainable()
        return facts.Facts(nominal, len(self._params), self.digest)

    def pack(self, step: int, numbers: Sequence[float]) -> Summand:
        """Copy the gradients into the buffer of this step. A missing one counts as zeros.

        Call `facts` before.
        """
        slot = self.slot(step)
        if slot.params is not self._params:
            self._allocate(slot)
        slot.numbers[:] = torch.tensor(numbers, dtype=torch.float64)
        own = [param.grad for param in slot.params]
        slot.counts[:] = torch.tensor([float(grad is not None) for grad in own])
        locals_, views = [], []
        for view, grad in zip(slot.views, own, strict=True):
            if grad is None:
                view.zero_()
            else:
                locals_.append(spi.local_tensor(grad))
                views.append(view.view_as(locals_[-1]))
        if views:
            torch._foreach_copy_(views, locals_)
        return slot

    def unpack(self, step: int, factor: float) -> None:
        """Set the gradients to the sum times ``factor``.

        A parameter that has a gradient on another replica only gets one here. Gradients then have
        the same order in memory on all replicas, because a norm of gradients that are neighbours
        has other last bits than the norm of the same gradients apart.
        """
        slot = self.slot(step)
        num_members = facts.num_members(slot.numbers[NUM_STEP:].tolist())
        counts = slot.counts.tolist()
        used = [(p, v) for p, v, n in zip(slot.params, slot.views, counts, strict=True) if n]
        if any(0 < count < num_members for count in counts):
            _lay_out([param for param, _ in used])
        locals_, views = [], []
        for param, view in used:
            assert param.grad is not None, "all members have it, or it was made"
            local = spi.local_tensor(param.grad)
            view = view.view_as(local)
            if local.dtype == view.dtype:
                locals_.append(local)
                views.append(view)
            else:  # the sum may be too large for the gradient's dtype
                local.copy_(view * factor)
        if locals_:
            torch._foreach_copy_(locals_, views)
            if factor != 1.0:
                torch._foreach_mul_(locals_, factor)


def _lay_out(params: Sequence[nn.Parameter]) -> None:
    """Give the parameters new gradients, one after the other in memory."""
    kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for param in params:
        param.grad = None
        kinds.setdefault((spi.local_tensor(param).device, param.dtype), []).append(param)
    for (device, dtype), several in kinds.items():
        sizes = [_size(param) for param in several]
        flat = torch.zeros(sum(sizes), device=device, dtype=dtype)
        for param, view in zip(several, flat.split(sizes), strict=True):
            param.grad = torch.zeros_like(param, requires_grad=False)
            local = spi.local_tensor(param.grad)
            storage, offset = flat.untyped_storage(), view.storage_offset()
            local.set_(storage, offset, local.shape, local.stride())


def numbers_of(summand: Summand) -> list[float]:
    """Return samples, loss and wishes."""
    numbers: list[float] = summand.numbers[:NUM_STEP].tolist()
    return numbers
