"""The state dict functions of ``torch.distributed.checkpoint``, for sharded models and optimizers.

They have its names and arguments, so a script changes one import::

    from vescale_fsdp.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, torch.load(path) if rank == 0 else {}, options=options)

Torch's own read a RaggedTensor and load sharded states. They cannot cut a whole tensor for one:
they take a rank's part for one box. Here each rank gets its part of each whole tensor, and all else
is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.state_dict import set_model_state_dict as torch_set_model
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as torch_set_optimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale_fsdp import compat
from vescale_fsdp.backends import collective_device
from vescale_fsdp.checkpoint import encoding, full
from vescale_fsdp.checkpoint.manifest import DTYPES
from vescale_fsdp.ranks import collectives, everyone

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_ROOT = "state"  # how names of tensors begin (`encoding.encode`)


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> Any:
    """Load a state dict into a model. Collective.

    Args:
        model: sharded or not, also on meta: then it gets memory.
        model_state_dict: sharded; with ``full_state_dict`` whole tensors, the same on every rank;
            with ``broadcast_from_rank0`` those of the first rank, and what others pass is ignored.

    Returns:
        Missing and unexpected names, as ``load_state_dict`` does. They are the same on every rank.

    Cost: with ``broadcast_from_rank0`` a broadcast of each tensor, and memory for one at a time;
    else no communication.

    Raises:
        CheckpointMismatchError: a tensor has another shape.
        RuntimeError: names are missing or unexpected, and ``strict`` is set.
    """
    options = options or StateDictOptions()
    if not _is_whole(options):
        return torch_set_model(model, dict(model_state_dict), options=options)
    own = {compat.fqn_of(model, path): (path, v) for path, v in model.state_dict().items()}
    targets = {name: value for name, (_, value) in own.items()}
    state = _placed(model_state_dict, targets, options)
    loaded = {own[name][0] if name in own else name: value for name, value in state.items()}
    assigns = any(isinstance(v, torch.Tensor) and v.is_meta for v in targets.values())
    return model.load_state_dict(loaded, strict=options.strict, assign=assigns)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load a state dict, by names, into optimizers. Collective.

    A state is sharded as the optimizer's own is.

    Args:
        model: whose parameters they train.
        optim_state_dict: as of `set_model_state_dict`. States of several optimizers are merged, as
            by ``get_optimizer_state_dict(model, optimizers)``.

    Cost: as of `set_model_state_dict`, and a step on zeros if the optimizer has no states.

    Raises:
        CheckpointMismatchError: a state has another shape.
    """
    options = options or StateDictOptions()
    several = [optimizers] if isinstance(optimizers, Optimizer) else [*optimizers]
    state = optim_state_dict
    if _is_whole(options):
        sharded = replace(options, full_state_dict=False, broadcast_from_rank0=False)
        targets = get_optimizer_state_dict(model, several, options=sharded)
        state, options = _placed(state, targets, options), sharded
    torch_set_optimizer(model, several, dict(state), options=options)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Both `set_model_state_dict`, whose result it returns, and `set_optimizer_state_dict`."""
    found = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return found


def _is_whole(options: StateDictOptions) -> bool:
    return bool(options.full_state_dict or options.broadcast_from_rank0)


def _placed(state: Mapping[str, Any], targets: Mapping[str, Any], options: StateDictOptions) -> Any:
    """This rank's parts of a whole state, as those of ``targets``, a tree like it, are cut."""
    if options.broadcast_from_rank0:
        return _Broadcast(state).placed(targets)

    def placed(value: Any, target: Any, name: str) -> Any:
        if not isinstance(value, Mapping):
            return _part_of(value, target, name)
        known = target if isinstance(target, Mapping) else {}
        return {key: placed(each, known.get(key), f"{name}.{key}") for key, each in value.items()}

    return placed(state, targets, _ROOT)


def _part_of(value: Any, target: Any, name: str) -> Any:
    """What a rank loads of a whole value."""
    if not (isinstance(value, torch.Tensor) and isinstance(target, torch.Tensor)):
        return value
    if target.is_meta and isinstance(target, DTensor):
        target = torch.empty_like(target, device=target.device_mesh.device_type)
    return full.part_of(value.detach(), target, name.removeprefix(f"{_ROOT}."))


class _Broadcast:
    """A state of the first rank, whose tensors come one after the other. Collective."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

        def told() -> list[Any]:
            text, self._tensors = encoding.encode(dict(state), _ROOT)
            kinds = {
                name: [encoding.dtype_name(each.dtype), list(each.shape)]
                for name, each in self._tensors.items()
            }
            return [text, kinds]

        self._text, self._kinds = everyone().from_first("load the state of the first rank", told)

    def placed(self, targets: Mapping[str, Any]) -> Any:
        """The state with this rank's parts, as those of ``targets`` are cut.

        Args:
            targets: a tree like the state, which may have more and less.
        """
        own = encoding.encode(dict(targets), _ROOT)[1]
        return encoding.decode(
            self._text,
            lambda name: _part_of(self._whole(name), own.get(name), name),
            "the state of the first rank",
        )

    def _whole(self, name: str) -> torch.Tensor:
        group = dist.group.WORLD
        if group is None or dist.get_world_size() == 1:
            return self._tensors[name]
        device = collective_device(group, torch.device("cpu"))
        if dist.get_rank() == 0:
            given = self._tensors[name].detach()
            given = given.full_tensor() if isinstance(given, DTensor) else given
            whole = given.to(device).contiguous()
        else:
            whole = torch.empty(self._kinds[name][1], dtype=self._dtype(name), device=device)
        collectives.broadcast(whole, 0, group).wait()
        return whole

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._kinds[name][0]]
