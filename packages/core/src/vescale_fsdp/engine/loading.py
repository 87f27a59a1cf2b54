"""Whole tensors in ``load_state_dict``: each rank takes its part of those of sharded parameters.

A hook before the load of each module that has sharded parameters. It runs after those that users
have registered before ``fully_shard``, which may rename and join tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import is_tensor_like

from vescale_fsdp.engine.fsdp_param import FSDPParam
from vescale_fsdp.ragged import distribute_tensor


def take_parts_of_loads(fsdp_params: Iterable[FSDPParam]) -> None:
    """Register the hook in all modules of these parameters."""
    modules = [
        module
        for fsdp_param in fsdp_params
        for ref, _ in fsdp_param.sites
        if (module := ref()) is not None
    ]
    for module in {id(each): each for each in modules}.values():
        hooks = module._load_state_dict_pre_hooks.values()
        if all(getattr(each, "hook", each) is not _take_own_parts for each in hooks):
            module.register_load_state_dict_pre_hook(_take_own_parts)


def _take_own_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """A hook before a load: cut whole tensors, which all ranks must have alike. No communication.

    Args:
        state_dict: a copy of the user's.

    Raises:
        ValueError: a tensor is another rank's part.
    """
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
