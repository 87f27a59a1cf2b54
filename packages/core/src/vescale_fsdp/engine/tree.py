"""Finding and replacing the tensors in what a module takes and returns.

Lists, tuples, named tuples, dictionaries and their subclasses (``ModelOutput``), and dataclasses
are looked into. A container is copied only if a tensor in it is replaced; all else is returned
as it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``fn`` applied to each tensor in it."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, list | tuple | set | frozenset):
        items = [map_tensors(fn, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):  # a named tuple takes its fields one by one
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        value = _with_items(value, {key: map_tensors(fn, item) for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, fn)
    return value


def tensors_requiring_grad(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` that require a gradient, each once, in order of appearance."""
    found: dict[int, torch.Tensor] = {}

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.setdefault(id(tensor), tensor)
        return tensor

    map_tensors(collect, value)
    return list(found.values())


def replace_tensors(value: Any, old: list[torch.Tensor], new: tuple[torch.Tensor, ...]) -> Any:
    """``value`` with each tensor of ``old`` replaced by its partner in ``new``."""
    partner = {id(before): after for before, after in zip(old, new, strict=True)}
    return map_tensors(lambda tensor: partner.get(id(tensor), tensor), value)


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    if all(items[key] is value[key] for key in items):
        return value
    changed = copy.copy(value)
    for key, item in items.items():
        changed[key] = item
    return changed


def _with_fields(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = value
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):
            continue
        old = getattr(value, field.name)
        new = map_tensors(fn, old)
        if new is not old:
            if changed is value:
                changed = copy.copy(value)
            object.__setattr__(changed, field.name, new)  # frozen dataclasses too
    return changed
