"""Weight gradients of linear layers that are computed straight into the gradient buffer.

Autograd makes the gradient of a weight as a tensor of its own, and the engine copies it to its
place in the flat buffer. Here the matrix product writes to that place::

    input ---> linear(input, weight.detach()) ---> _WeightGradient ---> output
                                                        |
    weight (for order only: it gets no gradient) -------+

The product, its operands and the order of sums are those of autograd, so the bits are too. All
else (the bias, the gradient of the input) stays with autograd. Whether the product may be written
is decided when it is there: where it would change anything, the node returns it, as autograd's own
would.

One thing is not as before: of a weight that a pass uses three times or more, some of them not by
its module, the uses by the module are summed first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from vescale_fsdp import compat
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.slot import Slot

__all__ = ["set_in_place"]


def set_in_place(groups: Iterable[Group], enable: bool) -> None:
    """Let the linear layers of ``groups`` write their weights' gradients, or no longer."""
    for group in groups:
        for index, slot in enumerate(group.slots):
            linear = _linear_of(group, slot)
            if linear is None:
                continue
            if isinstance(linear.__dict__.get("forward"), _Forward):
                del linear.__dict__["forward"]
            if enable and "forward" not in linear.__dict__:  # else somebody else has replaced it
                linear.__dict__["forward"] = _Forward(linear, group, index)


def _linear_of(group: Group, slot: Slot) -> nn.Linear | None:
    """The module that has ``slot`` as its weight, if it is a plain one and the only one."""
    if type(group) is not Group or slot.given is not None or slot.dim or len(slot.sites) != 1:
        return None
    module_ref, name = slot.sites[0]
    module = module_ref()
    cls = type(module)
    if isinstance(module, TorchFSDPModule):
        cls = cls.__mro__[module._orig_cls_mro_index]
    return module if cls is nn.Linear and name == "weight" else None  # type: ignore[return-value]


class _Forward:
    """``forward`` of one linear layer, which it knows weakly. A copy computes as `nn.Linear` does.

    Args:
        group: that has its weight, as parameter ``index``.
    """

    def __init__(self, linear: nn.Linear, group: Group | None = None, index: int = 0) -> None:
        self._linear = weakref.ref(linear)
        self._group = None if group is None else weakref.ref(group)
        self._index = index

    def __reduce__(self) -> Any:
        return _Forward, (self._linear(),)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        linear = self._linear()
        assert linear is not None, "it is being called"
        weight = linear.weight
        if not self._may_write(weight, input):
            return F.linear(input, weight, linear.bias)
        output = F.linear(input, weight.detach(), linear.bias)
        args = output, input.detach(), weight, self._group, self._index
        result: torch.Tensor = _WeightGradient.apply(*args)  # type: ignore[no-untyped-call]
        return result

    def _may_write(self, weight: torch.Tensor, input: torch.Tensor) -> bool:
        if torch.compiler.is_compiling():  # first, for Dynamo to see nothing of the rest
            return False
        group = None if self._group is None else self._group()
        return (
            group is not None
            and torch.is_grad_enabled()
            and self._index < len(group.slots)  # a tie may have left the group since
            and weight is group.slots[self._index].gathered
            and weight.requires_grad
            and type(input) is torch.Tensor
            and input.dim() > 1
            and input.is_contiguous()  # else torch might not compute it as one matrix product
            and input.dtype == weight.dtype
            and not torch.is_autocast_enabled(input.device.type)
            and not compat.is_transforming()
        )


class _WeightGradient(torch.autograd.Function):
    """The identity of a linear layer's output; its backward makes the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        group_ref: weakref.ref[Group],
        index: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.group_ref, ctx.index = group_ref, index
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Without a wish for this gradient (`torch.autograd.grad`) nobody else stops us.
        wish = compat.wish_of_backward(ctx.next_functions[-1][0])
        if grad is None or wish == "nothing":
            return grad, None, None, None, None
        (input,) = ctx.saved_tensors
        left, right = grad.reshape(-1, grad.shape[-1]).t(), input.view(-1, input.shape[-1])
        group = ctx.group_ref()
        if wish == "leaf" and group is not None and _write(group, ctx.index, left, right):
            return grad, None, None, None, None
        return grad, None, left.mm(right), None, None


def _write(group: Group, index: int, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Do what `Group.take_gradient` would do of ``left @ right``, unless that has to do it."""
    weight = group.slots[index].gathered
    assert weight is not None, "forward has compared it"
    is_there = group.is_gathered or group.frees_before_backward
    hooks = weight._post_accumulate_grad_hooks or {}  # the first is the engine's own
    if torch.is_grad_enabled() or not is_there or weight._backward_hooks or len(hooks) > 1:
        return False
    if not group.gradients.add_product(index, left, right, compat.current_backward()):
        return False
    group.on_gradient(weight.numel())
    return True
