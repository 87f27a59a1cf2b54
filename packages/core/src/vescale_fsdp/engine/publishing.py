"""``.grad`` of a group's sharded parameters: set from what was reduced, and dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from vescale_fsdp import compat
from vescale_fsdp.engine.slot import Slot, local_of


def publish(slots: Sequence[Slot], locals_: Iterable[torch.Tensor], gets: Iterable[bool]) -> None:
    """Set, or add to, the gradients of those that get one, and call the hooks on them.

    Args:
        locals_: this rank's part of each reduced gradient, flat.
    """
    hooked: list[Slot] = []
    with compat.without_torch_function():
        for slot, local, gets_one in zip(slots, locals_, gets, strict=True):
            if not gets_one:
                continue
            param = slot.sharded
            if param.grad is None:
                param.grad = slot.wrap(local)
            else:
                local_of(param.grad).add_(local_of(slot.wrap(local)))
            if param._post_accumulate_grad_hooks:
                hooked.append(slot)
    for slot in hooked:
        for hook in (slot.sharded._post_accumulate_grad_hooks or {}).values():
            hook(slot.sharded)


def zero(slots: Sequence[Slot], set_to_none: bool) -> None:
    """Drop gradients, or set them to zero in place."""
    with compat.without_torch_function():
        grads = [slot.sharded.grad for slot in slots]
    for slot, grad in zip(slots, grads, strict=True):
        if grad is not None and set_to_none:
            slot.sharded.grad = None
        elif grad is not None:
            grad.detach_().zero_()
