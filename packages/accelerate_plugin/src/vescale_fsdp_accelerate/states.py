"""States of models and optimizers: by names, sharded or whole, and back into sharded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "is_cut",
    "like",
    "load_model",
    "load_optimizer",
    "model_state",
    "optimizer_state",
    "parameter_names",
    "whole",
]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def model_state(model: nn.Module, *, trained_only: bool = False) -> dict[str, Any]:
    """The model's own tensors by names, tied ones under each; without the prefixes of wrappers."""
    options = StateDictOptions(ignore_frozen_params=trained_only)
    state = dict(get_model_state_dict(model, options=options))
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        clean = _clean(name)
        if clean in state:
            state[clean] = state[first.setdefault(id(param), clean)]
    return state


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def whole(tree: Any, *, keep: bool) -> Any:
    """Sharded tensors gathered, one after the other, to the host's memory. Collective.

    Tied ones are gathered once and stay one tensor.

    Args:
        keep: whether this process wants them; a mapping is empty in the others.
    """
    made: dict[int, torch.Tensor | None] = {}

    def gathered(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            is_own = isinstance(value, DTensor) and full.device.type == "cpu"
            made[id(value)] = full.detach().to("cpu", copy=not is_own) if keep else None
        return made[id(value)]

    with torch.no_grad():
        result = tree_map(gathered, tree)
    return result if keep else {}


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


def load_model(model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> Any:
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
    return set_model_state_dict(model, loaded, options=StateDictOptions(strict=strict))


def parameter_names(models: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in its order.

    Names in the first model that has all of them; if several models share the optimizer, with the
    number of the model before.

    Raises:
        CheckpointMismatchError: a parameter is none of theirs.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    every: dict[int, str] = {}
    for index, model in enumerate(models):
        names = _names_in(model)
        if all(id(param) in names for param in params):
            return [names[id(param)] for param in params]
        every = {**{key: f"{index}.{name}" for key, name in names.items()}, **every}
    strangers = sum(id(param) not in every for param in params)
    if strangers:
        raise CheckpointMismatchError(
            f"{type(optimizer).__name__} has {strangers} of {len(params)} parameters that are of "
            "no model that was prepared"
        )
    return [every[id(param)] for param in params]


def _names_in(model: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, param in model.named_parameters():
        names.setdefault(id(param), _clean(name))
    return names


def optimizer_state(names: list[str], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
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


def load_optimizer(
    names: list[str], optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> None:
    """Load a state dict by names, of whole or of sharded tensors.

    Parameters that have no state in it start anew, as those that never had a gradient.

    Raises:
        CheckpointMismatchError: it is of other parameters.
    """
    own = optimizer.state_dict()
    keys = [key for group in own["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    index_of = {name: index for index, name in enumerate(names)}
    options = {name: group for group in saved["param_groups"] for name in group["params"]}
    differ = sorted(options.keys() ^ set(names))
    if differ:
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer and this one differ in {len(differ)} parameters: "
            f"{', '.join(differ[:5])}"
        )
    state: dict[Any, Any] = {}
    for key, values in saved["state"].items():
        if key not in index_of:
            state[key] = values  # of the optimizer as a whole
            continue
        index = index_of[key]
        state[keys[index]] = {
            name: like(value, params[index], f"{key}.{name}")
            if is_cut(name, value, params[index])
            else value
            for name, value in values.items()
        }
    groups = []
    position = 0
    for group in own["param_groups"]:
        count = len(group["params"])
        found = options[names[position]] if count else group
        groups.append({**group, **found, "params": group["params"]})
        position += count
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def is_cut(name: str, value: Any, param: torch.Tensor) -> bool:
    """Whether a whole state is to be cut as its parameter is: it has an entry for each element.

    Of a parameter without dimensions that is not to be seen from its shape; there, as torch does
    when it loads states, all are but ``step``.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return value.shape == param.shape and (value.dim() > 0 or name != "step")
