"""Tensors that stand in for parameters during a call, as `torch.func.functional_call` registers.

It puts the tensors that it is given in the place of a module's parameters, calls the module, and
puts back what was there. A unit must neither hide them when it shows its own unsharded parameters,
nor take them for new parameters::

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

from vescale_fsdp.engine.fsdp_param import FSDPParam


class Place(NamedTuple):
    """Where a tensor of other code is registered, and what was made of it for a forward."""

    module: nn.Module
    name: str
    substitute: torch.Tensor
    made: torch.Tensor


def show_sharded(fsdp_params: Sequence[FSDPParam], *, drops: bool = False) -> None:
    """Register the sharded parameters in place of those that `show_gathered` has registered.

    Where other code has registered another tensor, that stays.

    Args:
        drops: replace plain parameters too, which have replaced those that were unsharded by hand.
    """
    for fsdp_param in fsdp_params:
        for module_ref, name in fsdp_param.sites:
            if (module := module_ref()) is not None:
                now = module._parameters.get(name)
                is_plain = isinstance(now, nn.Parameter) and not isinstance(now, DTensor)
                if now is fsdp_param.gathered or now is None or (drops and is_plain):
                    module._parameters[name] = fsdp_param.sharded


def show_gathered(fsdp_params: Sequence[FSDPParam]) -> None:
    """Register the unsharded parameters, for a user who has unsharded them by hand.

    Where other code has registered another tensor, that stays.
    """
    for fsdp_param in fsdp_params:
        for module_ref, name in fsdp_param.sites:
            if (module := module_ref()) is not None:
                now = module._parameters.get(name)
                if now is fsdp_param.sharded or now is None:
                    module._parameters[name] = fsdp_param.gathered


def gather_substitutes(fsdp_params: Sequence[FSDPParam]) -> list[Place]:
    """Gather the sharded tensors that stand in for unsharded parameters. Differentiable.

    Returns where it has registered what it has made, for `put_back`.

    Collective: `full_tensor` of each. Its gradient is the mean over the ranks, as of a parameter.

    Raises:
        ValueError: an ``nn.Parameter`` that is not sharded would be trained on each rank alone; or
            a sharded tensor stands in for a parameter that is also sharded by an inner parallelism.
    """
    made: dict[int, torch.Tensor] = {}  # of tied parameters one
    places = []
    for fsdp_param in fsdp_params:
        for module_ref, name in fsdp_param.sites:
            module = module_ref()
            now = None if module is None else module._parameters.get(name)
            if module is None or now is None or now is fsdp_param.gathered:
                continue
            if id(now) not in made:
                made[id(now)] = _gathered(now, fsdp_param)
            if made[id(now)] is not now:
                module._parameters[name] = made[id(now)]  # type: ignore[assignment]
                places.append(Place(module, name, now, made[id(now)]))
    return places


def put_back(places: Sequence[Place]) -> None:
    """Register the tensors of other code again, where `gather_substitutes` has made others."""
    for each in places:
        if each.module._parameters.get(each.name) is each.made:
            each.module._parameters[each.name] = each.substitute  # type: ignore[assignment]


def _gathered(substitute: torch.Tensor, fsdp_param: FSDPParam) -> torch.Tensor:
    """Return the whole tensor, on the device and in the dtype of the unsharded parameter."""
    if isinstance(substitute, DTensor) and (fsdp_param.given or fsdp_param.inner) is not None:
        raise ValueError(
            f"a sharded tensor was registered in place of the parameter {fsdp_param.fqn!r}, which "
            "is sharded by an inner parallelism too; pass a plain tensor to functional_call, or "
            "write to the parameter"
        )
    is_trained = substitute.requires_grad and torch.is_grad_enabled()
    is_plain = isinstance(substitute, nn.Parameter) and not isinstance(substitute, DTensor)
    if is_plain and is_trained:
        raise ValueError(
            f"the parameter {fsdp_param.fqn!r} was replaced by a plain nn.Parameter after the "
            "first forward: each rank would train its own. Write the values into the parameter "
            "(`p.data = vescale_fsdp.ragged.distribute_tensor(new, p.device_mesh, "
            "p.placements)`), or replace it before `fully_shard`. For functional_call, pass a "
            "tensor that is no nn.Parameter, such as `p.detach().requires_grad_()`"
        )
    full = substitute
    if isinstance(substitute, DTensor):
        mean = [Partial("avg")] * substitute.device_mesh.ndim
        full = substitute.full_tensor(grad_placements=mean if substitute.requires_grad else None)
    assert fsdp_param.gathered is not None, "the unit is unsharded"
    return full.to(fsdp_param.gathered.device, fsdp_param.gathered.dtype)
