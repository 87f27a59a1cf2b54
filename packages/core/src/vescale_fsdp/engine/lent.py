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

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from vescale_fsdp.engine.slot import Slot

_LENT = "_vescale_fsdp_lent"  # on a gathered tensor: the sharded one that it comes from


def show_sharded(slots: Sequence[Slot]) -> None:
    """Register the sharded parameters, except where other code has registered another tensor."""
    for slot in slots:
        for module_ref, name in slot.sites:
            if (module := module_ref()) is not None:
                now = module._parameters.get(name)
                if now is slot.gathered or now is None:
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


def gather_lent(slots: Sequence[Slot]) -> None:
    """Gather the sharded tensors that stand in for unsharded parameters. Differentiable.

    Collective: `full_tensor` of each. Its gradient is the mean over the ranks, as of a parameter.

    Raises:
        ValueError: an ``nn.Parameter`` that is not sharded would be trained on each rank alone; or
            a sharded tensor stands in for a parameter that is also sharded by an inner parallelism.
    """
    made: dict[int, torch.Tensor] = {}  # of tied parameters one
    for slot in slots:
        for module_ref, name in slot.sites:
            module = module_ref()
            now = None if module is None else module._parameters.get(name)
            if now is None or now is slot.gathered or hasattr(now, _LENT):
                continue
            if id(now) not in made:
                made[id(now)] = _gathered(now, slot)
            module._parameters[name] = made[id(now)]  # type: ignore[union-attr, assignment]


def put_back(slots: Sequence[Slot]) -> None:
    """Register the sharded tensors again that `gather_lent` has gathered: they are other code's."""
    for slot in slots:
        for module_ref, name in slot.sites:
            if (module := module_ref()) is not None:
                lent = getattr(module._parameters.get(name), _LENT, None)
                if lent is not None:
                    module._parameters[name] = lent


def _gathered(lent: torch.Tensor, slot: Slot) -> torch.Tensor:
    if isinstance(lent, DTensor):
        if slot.given is not None:
            raise ValueError(
                f"a sharded tensor was registered in place of the parameter {slot.fqn!r}, which "
                "is sharded by an inner parallelism too; pass a plain tensor to functional_call, "
                "or write to the parameter"
            )
        mean = [Partial("avg")] * lent.device_mesh.ndim
        full = lent.full_tensor(grad_placements=mean if lent.requires_grad else None)
        assert slot.gathered is not None, "the unit is unsharded"
        full = full.to(slot.gathered.dtype)
        setattr(full, _LENT, lent)
        return full
    if isinstance(lent, nn.Parameter) and lent.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"the parameter {slot.fqn!r} was replaced by a plain nn.Parameter after the first "
            "forward: each rank would train its own. Write the values into the parameter "
            "(`p.data = distribute_tensor(new, p.device_mesh, p.placements)`), or replace it "
            "before `fully_shard`"
        )
    return lent
