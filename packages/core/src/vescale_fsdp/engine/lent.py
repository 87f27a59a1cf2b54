"""Tensors that stand in for parameters during a call, as `torch.func.functional_call` registers.

It puts the tensors that it is given in the place of a module's parameters, calls the module, and
puts back what was there. A unit must neither overwrite them when it registers its own unsharded
parameters, nor take them for new parameters::

    functional_call(model, average, x)    registered: the tensors of ``average``
        forward of a unit                 a sharded one is gathered, a plain one is used as it is
        after that                        the tensors of ``average`` again: they are handed back
    returned                              the parameters

An ``nn.Parameter`` that replaces one of a model that has run is such a tensor too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from vescale_fsdp import compat
from vescale_fsdp.engine.slot import Slot


class Place(NamedTuple):
    """Where a tensor of other code is registered, and what was made of it for a forward."""

    module: nn.Module
    name: str
    lent: torch.Tensor
    made: torch.Tensor


def show_sharded(slots: Sequence[Slot], *, drops: bool = False) -> None:
    """Register the sharded parameters, except where other code has registered another tensor.

    Args:
        drops: replace plain parameters too, which have replaced those that were unsharded by hand.
    """
    for slot in slots:
        for module_ref, name in slot.sites:
            if (module := module_ref()) is not None:
                now = module._parameters.get(name)
                is_plain = isinstance(now, nn.Parameter) and not isinstance(now, DTensor)
                if now is slot.gathered or now is None or (drops and is_plain):
                    module._parameters[name] = slot.sharded


def show_gathered(slots: Sequence[Slot]) -> bool:
    """Register the unsharded parameters. Returns whether other code has registered other tensors.

    Those stay; `gather_lent` comes next.
    """
    has_others = False
    for slot in slots:
        for module_ref, name in slot.sites:
            if (module := module_ref()) is not None:
                now = module._parameters.get(name)
                if now is slot.sharded or now is None:
                    module._parameters[name] = slot.gathered
                elif now is not slot.gathered:
                    has_others = True
    return has_others


def gather_lent(slots: Sequence[Slot]) -> list[Place]:
    """Gather the sharded tensors that stand in for unsharded parameters. Differentiable.

    Returns where it has registered what it has made, for `put_back`.

    Collective: `full_tensor` of each. Its gradient is the mean over the ranks, as of a parameter.

    Raises:
        ValueError: an ``nn.Parameter`` that is not sharded would be trained on each rank alone; or
            a sharded tensor stands in for a parameter that is also sharded by an inner parallelism.
    """
    made: dict[int, torch.Tensor] = {}  # of tied parameters one
    places = []
    for slot in slots:
        for module_ref, name in slot.sites:
            module = module_ref()
            now = None if module is None else module._parameters.get(name)
            if module is None or now is None or now is slot.gathered:
                continue
            if id(now) not in made:
                made[id(now)] = _gathered(now, slot)
            if made[id(now)] is not now:
                module._parameters[name] = made[id(now)]  # type: ignore[assignment]
                places.append(Place(module, name, now, made[id(now)]))
    return places


def put_back(places: Sequence[Place]) -> None:
    """Register the tensors of other code again, where `gather_lent` has made others of them."""
    for each in places:
        if each.module._parameters.get(each.name) is each.made:
            each.module._parameters[each.name] = each.lent  # type: ignore[assignment]


def _gathered(lent: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the whole tensor, on the device and in the dtype of the unsharded parameter."""
    if isinstance(lent, DTensor) and (slot.given or slot.inner) is not None:
        raise ValueError(
            f"a sharded tensor was registered in place of the parameter {slot.fqn!r}, which is "
            "sharded by an inner parallelism too; pass a plain tensor to functional_call, or write "
            "to the parameter"
        )
    is_trained = lent.requires_grad and torch.is_grad_enabled()
    is_plain = isinstance(lent, nn.Parameter) and not isinstance(lent, DTensor)
    if is_plain and is_trained and not compat.in_functional_call():
        raise ValueError(
            f"the parameter {slot.fqn!r} was replaced by a plain nn.Parameter after the first "
            "forward: each rank would train its own. Write the values into the parameter "
            "(`p.data = distribute_tensor(new, p.device_mesh, p.placements)`), or replace it "
            "before `fully_shard`"
        )
    full = lent
    if isinstance(lent, DTensor):
        mean = [Partial("avg")] * lent.device_mesh.ndim
        full = lent.full_tensor(grad_placements=mean if lent.requires_grad else None)
    assert slot.gathered is not None, "the unit is unsharded"
    return full.to(slot.gathered.device, slot.gathered.dtype)
