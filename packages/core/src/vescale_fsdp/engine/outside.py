"""``parameters``, ``zero_grad``, gradients, and loads, of any module that holds sharded parameters.

The root and some units stay unsharded between forward and backward, and their unsharded parameters
are registered. Optimizers, clipping and ``zero_grad`` must get the sharded ones then, which have
the gradients. A module around a sharded one is the user's, or Fabric's, or that of
``torch.compile``. So these methods of ``nn.Module`` call the functions here
(`compat.replace_module_methods`), from the first call of ``fully_shard`` on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import is_tensor_like

from vescale_fsdp import compat
from vescale_fsdp.engine.inputs import run_backward
from vescale_fsdp.engine.late import is_managed
from vescale_fsdp.engine.reduce import drop_waiting
from vescale_fsdp.engine.slot import is_unsharded
from vescale_fsdp.engine.stepping import units_after_backward
from vescale_fsdp.engine.unit import units_in

Named = Iterator[tuple[str, nn.Parameter]]


def named_parameters(
    original: Callable[..., Named], module: nn.Module, *args: Any, **options: Any
) -> Named:
    """As ``nn.Module.named_parameters``, with the sharded parameters (see `Unit.shows_shards`)."""
    sharded: dict[int, nn.Parameter] | None = None
    for name, param in original(module, *args, **options):
        if not is_unsharded(param):
            yield name, param
            continue
        if sharded is None:
            sharded = {
                id(slot.gathered): slot.sharded
                for unit in (*units_in(module).values(), *units_after_backward())
                if unit.shows_shards and not unit.is_sharded
                for slot in unit.slots()
            }
        yield name, sharded.get(id(param), param)


def zero_grad(original: Callable[..., None], module: nn.Module, set_to_none: bool = True) -> None:
    """As ``nn.Module.zero_grad``. Also drops its accumulated gradients that are not reduced yet."""
    drop_waiting(module.parameters())
    original(module, set_to_none)


def _load_from_state_dict(
    original: Callable[..., None], module: nn.Module, *args: Any, **options: Any
) -> None:
    """As ``nn.Module`` loads its own parameters. Of whole tensors, each rank takes its part.

    All ranks must have the same. No communication. After hooks of users, which may rename and join
    tensors.

    Raises:
        ValueError: a tensor is another rank's part.
    """
    if not is_managed(module):
        return original(module, *args, **options)
    handle = module.register_load_state_dict_pre_hook(_take_own_parts)
    try:
        return original(module, *args, **options)
    finally:
        handle.remove()


def _take_own_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """A hook before a load. ``state_dict`` is a copy."""
    for name, param in module._parameters.items():
        loaded = state_dict.get(prefix + name)
        if not isinstance(param, DTensor) or not is_tensor_like(loaded):
            continue
        mesh = param.device_mesh
        if not isinstance(loaded, DTensor):
            if loaded.shape == param.shape:
                whole = torch.detach(loaded)  # it may be mapped from a file
                whole = whole if param.is_meta else whole.to(param.device)
                cut = distribute_tensor(whole, mesh, param.placements, src_data_rank=None)
                state_dict[prefix + name] = cut
        elif loaded.device_mesh == mesh:
            _check_is_own_part(loaded, mesh, prefix + name)


def _check_is_own_part(loaded: DTensor, mesh: DeviceMesh, name: str) -> None:
    """Raise if another rank has saved this tensor: its mesh still has that rank's coordinates.

    Raises:
        ValueError: these differ on an axis that shards the tensor.
    """
    theirs, own = loaded.device_mesh.get_coordinate(), mesh.get_coordinate()
    if theirs is None or own is None or theirs == own:
        return
    at = zip(theirs, own, loaded.placements, strict=True)
    if any(mine != other and not placed.is_replicate() for other, mine, placed in at):
        raise ValueError(
            f"load_state_dict: {name!r} is the part of the rank at {theirs} of the mesh, expected "
            f"that of this rank, at {own}. torch.save of a sharded state_dict writes one rank's "
            "parts. Save with vescale_fsdp.checkpoint, or let all ranks gather whole tensors "
            "before one of them writes: get_model_state_dict with full_state_dict=True"
        )


def unreduced_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters with gradients of earlier backwards that are not reduced yet."""
    groups = [group for unit in units_in(module).values() for group in unit.groups]
    slots = [slot for group in groups if group.gradients.are_waiting for slot in group.slots]
    return [slot.sharded for slot in slots if slot.sharded.requires_grad]


def reach_from_outside() -> None:
    """Replace these methods, and `run_backward`. Further calls do nothing."""
    compat.replace_module_methods(named_parameters, zero_grad, _load_from_state_dict)
    compat.replace_backward(run_backward)
