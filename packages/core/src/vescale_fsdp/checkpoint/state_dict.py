"""The state dict functions of ``torch.distributed.checkpoint``, for sharded models and optimizers.

They have its names and arguments, so a script changes one import::

    from vescale_fsdp.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    whole = get_model_state_dict(model, options=options)  # {} on all ranks but the first
    set_model_state_dict(model, whole, options=options)

Torch's own read a RaggedTensor and load sharded states. They cannot cut a whole tensor for one:
they take a rank's part for one box. Here each rank gets its part of each whole tensor, and all else
is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
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
from vescale_fsdp.errors import CheckpointValueError
from vescale_fsdp.ragged import as_bytes
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
        CheckpointValueError: what the first rank is to send is a DTensor, or needs a pickle.
        RuntimeError: names are missing or unexpected, and ``strict`` is set.
    """
    options = options or StateDictOptions()
    if not _is_whole(options):
        return torch_set_model(model, dict(model_state_dict), options=options)
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    own = {compat.fqn_of(model, path): (path, tensor) for path, tensor in tensors}
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

    A state is sharded as the optimizer's own is, or as its parameter if it has none yet.

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
        params = {compat.fqn_of(model, name): each for name, each in model.named_parameters()}
        state, options = _placed(state, targets, options, params), sharded
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


def _placed(
    state: Mapping[str, Any],
    targets: Mapping[str, Any],
    options: StateDictOptions,
    params: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """This rank's parts of a whole state.

    Args:
        targets: a tree like it, whose tensors are cut as these are to be; may have more and less.
        params: by the names that keys of states begin with. A state without a target, and of the
            shape of the parameter, is cut as that is.
    """
    own: dict[str, Any] = dict(_leaves(targets, _ROOT))

    def part_of(value: Any, name: str) -> Any:
        target = own.get(name)
        if target is None and params and isinstance(value, torch.Tensor):
            fqn = name.removeprefix(f"{_ROOT}.state.").rpartition(".")[0]
            param = params.get(fqn)
            target = param if param is not None and param.shape == value.shape else None
        return _part_of(value, target, name, options)

    if options.broadcast_from_rank0:
        return _Broadcast(state).mapped(part_of)

    def mapped(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: mapped(each, f"{name}.{key}") for key, each in value.items()}
        return part_of(value, name)

    return mapped(state, _ROOT)


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What is no mapping in nested mappings, by the names of `encoding.encode`."""
    if not isinstance(tree, Mapping):
        yield name, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{name}.{key}")


def _part_of(value: Any, target: Any, name: str, options: StateDictOptions) -> Any:
    """What a rank loads of a whole value."""
    if not (isinstance(value, torch.Tensor) and isinstance(target, torch.Tensor)):
        return value
    device = target.device
    if target.is_meta:
        on_mesh = target.device_mesh.device_type if isinstance(target, DTensor) else value.device
        device = torch.device("cpu") if options.cpu_offload else torch.device(on_mesh)
        target = torch.empty_like(target, device=device)
    part = full.part_of(value.detach(), target, name.removeprefix(f"{_ROOT}."))
    return part if isinstance(part, DTensor) else part.to(device)


class _Broadcast:
    """A state of the first rank, whose tensors come one after the other. Collective.

    Its values are of the types that `encoding.encode` keeps: nothing is unpickled.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

        def told() -> list[Any]:
            text, self._tensors = encoding.encode(dict(state), _ROOT)
            for name, each in self._tensors.items():
                if isinstance(each, DTensor):  # to gather it takes all ranks
                    raise CheckpointValueError(
                        f"{name.removeprefix(f'{_ROOT}.')!r} is a DTensor: with "
                        "broadcast_from_rank0 pass whole tensors on the first rank, as of "
                        "get_model_state_dict(..., full_state_dict=True)"
                    )
            kinds = {
                name: [encoding.dtype_name(each.dtype), list(each.shape)]
                for name, each in self._tensors.items()
            }
            return [text, kinds]

        self._text, self._kinds = everyone().from_first("load the state of the first rank", told)

    def mapped(self, part_of: Callable[[torch.Tensor, str], Any]) -> Any:
        """The state, with ``part_of`` each whole tensor and its name."""
        return encoding.decode(
            self._text,
            lambda name: part_of(self._whole(name), name),
            "the state of the first rank",
        )

    def _whole(self, name: str) -> torch.Tensor:
        group = dist.group.WORLD
        if group is None or dist.get_world_size() == 1:
            return self._tensors[name]
        dtype, shape = self._kinds[name]
        device = collective_device(group, torch.device("cpu"))
        if dist.get_rank() == 0:
            whole = self._tensors[name].detach().to(device).contiguous()
        else:
            whole = torch.empty(shape, dtype=DTYPES[dtype], device=device)
        if whole.numel():  # bytes, whatever the dtype: gloo knows few
            collectives.broadcast(as_bytes(whole), 0, group).wait()
        return whole if whole.dim() else whole.cpu()  # a counter of steps
