"""Full state dicts of sharded models and optimizers, as a single process would save them.

Formats with one file need them: Lightning's ``.ckpt``, Accelerate's ``.bin``. Tensors are
all-gathered one at a time. The process that keeps them needs memory for all. `save` and
`save_safetensors` do not gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale_fsdp import compat
from vescale_fsdp.checkpoint.contents import weights_of
from vescale_fsdp.checkpoint.optimizer import NamedOptimizer, Snapshot
from vescale_fsdp.checkpoint.saving import begin_save
from vescale_fsdp.errors import CheckpointMismatchError
from vescale_fsdp.ragged import distribute_tensor, redistribute

Models = nn.Module | Sequence[nn.Module]


# Save


def model_state(model: nn.Module, *, trained_only: bool = False) -> dict[str, Any]:
    """Return the model's state dict, its names without the prefixes of wrappers. No copies.

    Args:
        trained_only: leave out frozen parameters.
    """
    state = weights_of(model, "trained" if trained_only else "all")
    first: dict[int, str] = {}  # tied parameters stay one tensor with several names
    for path, param in model.named_parameters(remove_duplicate=False):
        name = compat.fqn_of(model, path)
        if name in state:
            state[name] = state[first.setdefault(id(param), name)]
    return state


def optimizer_state(models: Models, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with parameter names instead of numbers. No copies.

    Args:
        models: one or several. Names are from the first model that has all parameters of the
            optimizer. If none has all, names begin with the number of the model.

    Raises:
        CheckpointMismatchError: a parameter is in none of the models.
    """
    return _named(models, optimizer).tree()


def owner(models: Models, optimizer: Optimizer) -> nn.Module:
    """Return the first model that has all parameters of an optimizer; else all in a ModuleList."""
    each = [models] if isinstance(models, nn.Module) else list(models)
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for model in each:
        if len(each) == 1 or params <= {id(param) for param in model.parameters()}:
            return model
    return nn.ModuleList(each)


def parameters(models: Models, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return an optimizer's parameters by the names of `optimizer_state`, in its order."""
    return _named(models, optimizer).params


def gathered(tree: Any, *, keep: bool) -> Any:
    """Return the same tree with full tensors in host memory. Collective.

    Args:
        keep: whether this process keeps the tensors. If not, it gets None instead of each.

    Cost: one all-gather for each sharded tensor. A tensor that is in the tree twice is gathered
    once and stays one tensor.

    Raises:
        RankMismatchError: a rank did not come to it, as for `begin_save`.
    """
    begin_save()  # a gather that one rank alone begins ends in an abort of gloo
    made: dict[int, torch.Tensor | None] = {}

    def each(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            own = compat.local_tensor(value)  # a replicated tensor is full already
            is_new = compat.storages_of(full).isdisjoint(compat.storages_of(own))
            made[id(value)] = full.detach().to("cpu", copy=not is_new) if keep else None
        return made[id(value)]

    with torch.no_grad():
        return compat.pytree.tree_map(each, tree)


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the names in an `optimizer_state` by numbers, as ``optimizer.state_dict()`` does."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    number: dict[Any, Any] = {name: i for i, name in enumerate(names)}
    return {
        "state": {number.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [number[name] for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }


# Load


def part_of(full: torch.Tensor, target: torch.Tensor, name: str) -> torch.Tensor:
    """Return this rank's part of a full tensor, sharded as ``target``. No communication.

    A tensor that is sharded already is redistributed if its placements differ.

    Raises:
        CheckpointMismatchError: the shapes differ.
    """
    _check_shape(full, target, name)
    if isinstance(full, DTensor) and isinstance(target, DTensor):
        same = (full.device_mesh, full.placements) == (target.device_mesh, target.placements)
        return full if same else redistribute(full, target.device_mesh, target.placements)
    if not isinstance(target, DTensor):
        return full.full_tensor() if isinstance(full, DTensor) else full
    moved = full.to(device=target.device)
    return distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)


def load_model(model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> Any:
    """Load full tensors into a sharded model. Every process has all of them. No communication.

    Returns:
        Missing and unexpected names, as ``load_state_dict`` does.

    Raises:
        CheckpointMismatchError: a tensor has another shape.
        RuntimeError: with ``strict``, names are missing or unexpected.
    """
    own = model_state(model)
    loaded: dict[str, Any] = {
        name: part_of(value, own[name], name) if name in own else value
        for name, value in state.items()
    }
    return set_model_state_dict(model, loaded, options=StateDictOptions(strict=strict))


def load_optimizer(models: Models, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load full states into an optimizer of sharded parameters. Every process has all of them.

    Each state is sharded as the optimizer shards its own. Missing states are made first, in a step
    on zeros, which communicates if the optimizer's step does. Parameters that have no states in
    ``saved`` have none afterwards.

    Args:
        models: as in `optimizer_state`.
        saved: by names, or by numbers as in ``optimizer.state_dict()``. Tensors may be sharded. If
            their placements differ from the optimizer's, they are all-gathered.

    Raises:
        CheckpointMismatchError: ``saved`` is of other parameters, a state has another shape, or
            parameters of one group were saved in several groups with different options. The
            optimizer has not changed.
    """
    named = _named(models, optimizer)
    state, groups = _by_name(saved, named)
    named.check(groups, strict=True)
    before = Snapshot(optimizer)
    try:
        named.make_states({key: state[key] for key in named.params if key in state})
        pairs = [
            (value, own[key], f"{fqn}.{key}")
            for fqn, param in named.params.items()
            for own in [optimizer.state.get(param, {})]
            for key, value in state.get(fqn, {}).items()
            if isinstance(value, torch.Tensor) and isinstance(own.get(key), torch.Tensor)
        ]
        for value, target, name in pairs:
            _check_shape(value, target, name)
    except BaseException:
        before.restore()
        raise
    with torch.no_grad():
        for value, target, name in pairs:
            if isinstance(value, DTensor) and value.placements != target.placements:
                value = value.full_tensor()
            target.copy_(value if isinstance(value, DTensor) else part_of(value, target, name))
    filled = {name: target for _, target, name in pairs}
    named.load(
        {
            fqn: {key: filled.get(f"{fqn}.{key}", value) for key, value in each.items()}
            for fqn, each in state.items()
        },
        groups,
        strict=True,
    )


def take_whole_states(optimizer: Optimizer) -> None:
    """Let ``optimizer.load_state_dict`` take whole states: each rank its part.

    All ranks must have the same. No communication. Without it torch keeps whole states beside
    sharded parameters, and the next step raises. Optimizers of ``vescale_fsdp.optim`` take them
    anyway.
    """
    optimizer.register_load_state_dict_post_hook(_cut_states)


def _cut_states(optimizer: Optimizer) -> None:
    for param, state in optimizer.state.items():
        if not isinstance(param, DTensor) or all(p.is_replicate() for p in param.placements):
            continue
        for key, value in state.items():
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            # A parameter without dimensions has the shape of its counter of steps.
            if is_plain and key != "step" and value.shape == param.shape:
                state[key] = part_of(value, param, key)


def _named(models: Models, optimizer: Optimizer) -> NamedOptimizer:
    return NamedOptimizer(type(optimizer).__name__, optimizer, owner(models, optimizer))


def _by_name(
    saved: Mapping[str, Any], named: NamedOptimizer
) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Return the saved states and groups with the parameter names of ``named``."""
    listed = [key for group in saved["param_groups"] for key in group["params"]]
    if all(isinstance(key, str) for key in listed):
        differ = sorted(set(listed) ^ set(named.params))
        if differ:
            raise CheckpointMismatchError(
                f"either the checkpoint's optimizer or this {named.name} does not have "
                f"{', '.join(differ[:5])}{' and others' if len(differ) > 5 else ''}; make it as "
                "it was when it was saved"
            )
        return dict(saved["state"]), list(saved["param_groups"])
    name_of = named.by_number(saved["param_groups"])
    groups = [
        {**group, "params": [name_of[key] for key in group["params"]]}
        for group in saved["param_groups"]
    ]
    return {name_of.get(key, key): value for key, value in saved["state"].items()}, groups


def _check_shape(found: torch.Tensor, target: torch.Tensor, name: str) -> None:
    if found.shape != target.shape:
        raise CheckpointMismatchError(
            f"{name!r} has the shape {tuple(found.shape)} in the checkpoint and "
            f"{tuple(target.shape)} here"
        )
