"""Checkpoints of Fabric: a dictionary of the user that contains models and optimizers.

The formats are those of `checkpoints`. In a sealed directory, parameter names begin with the key of
their model if there are several models; they have no prefix if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vescale_fsdp.checkpoint import full
from vescale_fsdp.spi import check_reduced
from vescale_fsdp_lightning import torch_format
from vescale_fsdp_lightning.checkpoints import (
    Checkpoints,
    load_sealed,
    read_manifest,
    save_sealed,
)
from vescale_fsdp_lightning.fabric_forward import sharded_in
from vescale_fsdp_lightning.places import agree
from vescale_fsdp_lightning.store import is_first

__all__ = ["load", "save"]

Filter = Mapping[str, Callable[[str, Any], bool]]


class _Parts:
    """The models, optimizers and other values of the user's dictionary."""

    def __init__(self, state: Mapping[str, Any], verb: str) -> None:
        self.models = {
            key: sharded_in(each) for key, each in state.items() if isinstance(each, nn.Module)
        }
        self.optimizers = {key: each for key, each in state.items() if isinstance(each, Optimizer)}
        self.rest = {
            key: each for key, each in state.items() if not isinstance(each, nn.Module | Optimizer)
        }
        if not self.models:
            raise ValueError(
                f"there is no model in the arguments of fabric.{verb}, so it does not know how "
                f'tensors are sharded: fabric.{verb}(path, {{"model": model, ...}})'
            )
        self.has_several = len(self.models) > 1
        single = next(iter(self.models.values()))
        self.model = nn.ModuleDict(self.models) if self.has_several else single

    def model_in(self, path: Path) -> nn.Module:
        """Return a module whose parameter names match those in a sealed directory. Collective.

        One of several saved models has its key before its names, a model that was saved alone not.
        """
        if self.has_several:
            return self.model
        (key,) = self.models
        saved = read_manifest(path).tensors
        own = full.model_state(self.model)
        alone = sum(f"model.{name}" in saved for name in own)
        among_others = sum(f"model.{key}.{name}" in saved for name in own)
        return nn.ModuleDict(self.models) if among_others > alone else self.model

    def owner(self, optimizer: Optimizer) -> nn.Module:
        """Return the model that has the parameters of an optimizer."""
        first = optimizer.param_groups[0]["params"][0]
        for model in self.models.values():
            if any(param is first for param in model.parameters()):
                return model
        return self.model


def save(checkpoints: Checkpoints, path: str, state: Mapping[str, Any], filter: Filter) -> None:
    """Save. After an error or a kill there is no incomplete checkpoint at ``path``. Collective.

    Raises:
        NotImplementedError: a filter was passed, and the format is not "full".
        ValueError: there is no model in ``state``.
    """
    parts = _Parts(state, "save")
    if filter and not checkpoints.is_full:
        raise NotImplementedError(
            "fabric.save(filter=...) leaves out parts of a model; a sharded checkpoint holds all "
            'of it. Choose VeScaleFabricStrategy(state_dict_type="full")'
        )
    rest = {
        key: each.state_dict() if hasattr(each, "state_dict") else each
        for key, each in parts.rest.items()
    }

    def check() -> None:  # each by itself: one may be sharded, and another the same on all ranks
        for model in parts.models.values():
            check_reduced(model, "fabric.save")

    if not checkpoints.is_full and checkpoints.options.state_dict_type == "sharded":
        agree(check)
        checkpoints.store.publish(
            path,
            lambda target, may_wait: save_sealed(
                target,
                parts.model,
                parts.optimizers,
                rest,
                checkpoints.options,
                step=rest.get("step"),
                may_wait=may_wait,
                models=list(parts.models),
            ),
        )
        return
    trees: dict[str, Any] = {key: full.model_state(each) for key, each in parts.models.items()}
    for key, each in parts.optimizers.items():
        trees[key] = full.optimizer_state(parts.owner(each), each)
    if not checkpoints.is_full:
        checkpoints.store.publish(path, lambda target, _: torch_format.save(target, trees, rest))
        return
    for key, keep in filter.items():
        tree = trees if key in trees else rest
        if isinstance(tree[key], dict):
            tree[key] = {name: each for name, each in tree[key].items() if keep(name, each)}
    values = {**full.gathered(trees, keep=is_first()), **rest}
    checkpoints.store.publish_file(path, lambda stream: torch.save(values, stream))


def load(
    checkpoints: Checkpoints,
    path: str,
    state: Any,
    *,
    strict: bool,
    weights_only: bool | None,
    local_rank: int,
) -> dict[str, Any]:
    """Load into the objects of ``state`` in place. Returns the other values. Collective.

    Args:
        state: the user's dictionary. Or a model (``fabric.load_raw``); then the checkpoint is a
            file with its state dict, or a sealed directory with this model only.

    Raises:
        KeyError: with ``strict``, a key of ``state`` was not saved.
        NotImplementedError: ``state`` is an optimizer.
        ValueError: ``state`` is a model, and the directory has keys.
    """
    only = checkpoints.options.weights_only if weights_only is None else weights_only
    with checkpoints.store.fetch(path, local_rank) as found:
        if isinstance(state, nn.Module):
            _load_raw(found, sharded_in(state), strict, only)
            return {}
        if isinstance(state, Optimizer):
            raise NotImplementedError(
                "fabric.load_raw of an optimizer does not work with sharded parameters; "
                'fabric.load(path, {"model": model, "optimizer": optimizer}) does'
            )
        parts = _Parts(state, "load")
        rest = _load(found, parts, strict, only)
    for key, each in parts.rest.items():
        if key not in rest:
            if strict:
                raise KeyError(
                    f"{key!r} is not in the checkpoint, which has {sorted(rest)}; leave it out, or "
                    "pass strict=False"
                )
            continue
        value = rest.pop(key)
        if hasattr(each, "load_state_dict"):
            each.load_state_dict(value)
        else:
            state[key] = value
    return rest


def _load_raw(found: Path, model: nn.Module, strict: bool, weights_only: bool) -> None:
    if found.is_file():
        agree(
            lambda: full.load_model(
                model, torch_format.read_file(found, weights_only), strict=strict
            )
        )
    elif (found / torch_format.METADATA).is_file():
        raise ValueError(
            f"{found} is a directory of several things by their keys, and fabric.load_raw(path, "
            'model) has none; fabric.load(path, {"model": model}) loads what was saved as "model"'
        )
    else:
        load_sealed(found, model, {}, strict, rng=False)


def _load(found: Path, parts: _Parts, strict: bool, weights_only: bool) -> dict[str, Any]:
    if found.is_file():
        values: dict[str, Any] = {}

        def take() -> None:
            values.update(torch_format.read_file(found, weights_only))
            for key, model in parts.models.items():
                full.load_model(model, values.pop(key), strict=strict)
            for key, each in parts.optimizers.items():
                full.load_optimizer(parts.owner(each), each, values.pop(key))

        agree(take)
        return values
    if not (found / torch_format.METADATA).is_file():
        model = parts.model_in(found)
        return load_sealed(found, model, parts.optimizers, strict, rng=bool(parts.optimizers))
    directory = torch_format.Directory(found)
    for key, model in parts.models.items():
        directory.load_model(directory.first_of((key,)), model, strict=strict)
    for key, each in parts.optimizers.items():
        directory.load_optimizer(directory.first_of((key,)), parts.owner(each), each)
    return directory.values(weights_only)
