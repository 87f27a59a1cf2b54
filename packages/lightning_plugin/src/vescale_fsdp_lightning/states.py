"""States of models and optimizers: by names, sharded or whole, and back into sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from vescale_fsdp import CheckpointMismatchError

__all__ = [
    "load_model",
    "load_optimizer",
    "model_state",
    "optimizer_state",
    "parameter_names",
    "whole",
]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")


def model_state(model: nn.Module) -> dict[str, Any]:
    """The model's own tensors by names, without the prefixes of ``torch.compile`` and the like."""
    return dict(get_model_state_dict(model))


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in its order."""
    names: dict[int, str] = {}
    for name, param in model.named_parameters():
        clean = ".".join(part for part in name.split(".") if part not in _WRAPPERS[:3])
        names.setdefault(id(param), clean)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [names[id(param)] for param in params]


def optimizer_state(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    """An optimizer's state dict with names in the place of numbers. Tensors are its own."""
    saved = optimizer.state_dict()
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    name_of = dict(zip(keys, names, strict=True))
    return {
        "state": {name_of.get(key, key): value for key, value in saved["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[key] for key in group["params"]]}
            for group in saved["param_groups"]
        ],
    }


def whole(tree: Any, *, keep: bool) -> Any:
    """Sharded tensors gathered, one after the other, to the host's memory. Collective.

    Args:
        keep: whether this process wants them; the others get None in their place.
    """

    def gathered(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        full = value.full_tensor() if isinstance(value, DTensor) else value
        return full.detach().to("cpu", copy=not isinstance(value, DTensor)) if keep else None

    with torch.no_grad():
        return tree_map(gathered, tree)


def like(full: torch.Tensor, target: torch.Tensor, name: str) -> torch.Tensor:
    """This process' part of a whole tensor, cut as ``target`` is. No communication.

    Raises:
        CheckpointMismatchError: it has another shape.
    """
    if full.shape != target.shape:
        raise CheckpointMismatchError(
            f"{name!r} has the shape {tuple(full.shape)} in the checkpoint and "
            f"{tuple(target.shape)} in the model"
        )
    if not isinstance(target, DTensor):
        return full
    cast = full.to(device=target.device)
    return distribute_tensor(cast, target.device_mesh, target.placements, src_data_rank=None)


def load_model(model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool) -> None:
    """Load whole tensors into a sharded model. Each process takes its part.

    Raises:
        CheckpointMismatchError: a tensor has another shape.
        RuntimeError: with ``strict``, names are missing or not known.
    """
    own = model_state(model)
    loaded: dict[str, Any] = {
        name: like(value, own[name], name) if name in own else value
        for name, value in state.items()
    }
    set_model_state_dict(model, loaded, options=StateDictOptions(strict=strict))


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> None:
    """Load a state dict of whole tensors, or of sharded ones, into an optimizer of sharded ones.

    Args:
        saved: as of an optimizer of whole parameters, by numbers or by names.

    Raises:
        CheckpointMismatchError: it is of other parameters.
    """
    names = parameter_names(model, optimizer)
    own = optimizer.state_dict()
    keys = [key for group in own["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    position = _positions(saved, names, keys)
    state: dict[Any, Any] = {}
    for key, values in saved["state"].items():
        if key not in position:
            state[key] = values  # of the optimizer as a whole
            continue
        index = position[key]
        state[keys[index]] = _like_param(values, params[index], names[index])
    groups = _groups(own["param_groups"], saved["param_groups"], type(optimizer).__name__)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _positions(saved: Mapping[str, Any], names: list[str], keys: list[Any]) -> dict[Any, int]:
    """Where a key of the saved state is among the parameters."""
    listed = [key for group in saved["param_groups"] for key in group["params"]]
    if all(isinstance(key, str) for key in listed):
        return {name: index for index, name in enumerate(names)}
    if len(listed) != len(keys):
        raise CheckpointMismatchError(
            f"the checkpoint has an optimizer of {len(listed)} parameters, and this one has "
            f"{len(keys)}; make it as it was made when it was saved"
        )
    return {key: index for index, key in enumerate(listed)}


def _like_param(values: Mapping[str, Any], param: torch.Tensor, name: str) -> dict[str, Any]:
    made = {}
    for key, value in values.items():
        is_cut = isinstance(value, torch.Tensor) and value.dim() > 0
        if is_cut and not isinstance(value, DTensor):
            value = like(value, param, f"{name}.{key}")
        made[key] = value
    return made


def _groups(
    own: list[dict[str, Any]], saved: list[dict[str, Any]], optimizer: str
) -> list[dict[str, Any]]:
    if len(own) != len(saved):
        raise CheckpointMismatchError(
            f"the checkpoint has {len(saved)} groups of parameters, and {optimizer} has {len(own)}"
        )
    return [
        {**group, **other, "params": group["params"]}
        for group, other in zip(own, saved, strict=True)
    ]


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state by names as an optimizer of whole parameters saves it: by numbers, in its order."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    number: dict[Any, int] = {name: i for i, name in enumerate(names)}
    to_number: Callable[[Any], Any] = lambda key: number.get(key, key)  # noqa: E731
    return {
        "state": {to_number(key): value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [number[name] for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }
