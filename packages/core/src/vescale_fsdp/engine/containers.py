"""Containers of tensors: what a unit is given, and what it returns.

Tensors are found in lists, tuples, named tuples, dictionaries and their subclasses
(``ModelOutput``), and dataclasses. A container is copied only if a tensor in it is replaced. What a
forward changes in a copy (``batch["x"] = ...``, ``features.append(...)``) is carried back to the
caller's container (`Copies`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence


class _Copy(NamedTuple):
    original: Any
    copied: Any
    before: dict[Any, Any]  # its items when it was made


class Copies:
    """Containers that were copied for one forward."""

    def __init__(self) -> None:
        self.made: list[_Copy] = []

    def add(self, original: Any, copied: Any) -> None:
        """Note that ``copied`` takes the place of ``original``."""
        self.made.append(_Copy(original, copied, _items_of(copied)))

    def new_items(self) -> list[Any]:
        """Return what the forward has put into copies."""
        found = []
        for _, copied, before in self.made:
            known = {id(item) for item in before.values()}
            found += [item for item in _items_of(copied).values() if id(item) not in known]
        return found

    def carry_back(self, fn: Callable[[Any], Any] = lambda item: item) -> None:
        """Change the originals as the copies were changed, with ``fn`` applied to new items."""
        done: dict[int, Any] = {}  # new items, to which ``fn`` was applied
        for original, copied, before in reversed(self.made):  # the last are copies of copies
            now = _items_of(copied)
            if now.keys() == before.keys() and all(now[key] is before[key] for key in now):
                continue
            items = _items_of(original)
            former = done | {id(item): items[key] for key, item in before.items() if key in items}
            for key, item in now.items():
                now[key] = former[id(item)] if id(item) in former else fn(item)
                done[id(now[key])] = now[key]
            _set_items(original, now)
        self.made.clear()


def _items_of(container: Any) -> dict[Any, Any]:
    if isinstance(container, list):
        return dict(enumerate(container))
    if isinstance(container, dict):
        return dict(container)
    names = [field.name for field in dataclasses.fields(container)]
    return {name: getattr(container, name) for name in names if hasattr(container, name)}


def _set_items(container: Any, items: dict[Any, Any]) -> None:
    if isinstance(container, list):
        container[:] = items.values()
        return
    if isinstance(container, dict):
        for key in container.keys() - items.keys():
            del container[key]
        for key, item in items.items():
            if key not in container or container[key] is not item:
                container[key] = item
        return
    for name, item in items.items():
        object.__setattr__(container, name, item)  # frozen ones too


def map_tensors(
    fn: Callable[[torch.Tensor], torch.Tensor], value: Any, copies: Copies | None = None
) -> Any:
    """Return ``value`` with ``fn`` applied to each tensor in it.

    Args:
        copies: gets the containers that were copied, and can be changed.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, list | tuple | set | frozenset):
        items = [map_tensors(fn, item, copies) for item in value]
        if isinstance(value, PackedSequence):
            items[1] = value.batch_sizes  # always on the host
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):  # a named tuple takes its fields one by one
            return type(value)(*items)
        made = type(value)(items)
        if copies is not None and isinstance(value, list):
            copies.add(value, made)
        return made
    changed: Any = value
    if isinstance(value, dict):
        changed = _with_items(value, {k: map_tensors(fn, v, copies) for k, v in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = _with_fields(changed, fn, copies)
    if copies is not None and changed is not value:
        copies.add(value, changed)
    return changed


def tensors_requiring_grad(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value`` that require a gradient, each once, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    found: dict[int, torch.Tensor] = {}

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.setdefault(id(tensor), tensor)
        return tensor

    map_tensors(collect, value)
    return list(found.values())


def replace_tensors(
    value: Any,
    old: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    copies: Copies | None = None,
) -> Any:
    """Return ``value`` with each tensor of ``old`` replaced by the one at its index in ``new``."""
    partner = {id(before): after for before, after in zip(old, new, strict=True)}
    return map_tensors(lambda tensor: partner.get(id(tensor), tensor), value, copies)


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    if all(items[key] is value[key] for key in items):
        return value
    changed = copy.copy(value)
    for key, item in items.items():
        changed[key] = item
    return changed


def _with_fields(
    value: Any, fn: Callable[[torch.Tensor], torch.Tensor], copies: Copies | None
) -> Any:
    changed = value
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):
            continue
        old = getattr(value, field.name)
        new = map_tensors(fn, old, copies)
        if new is not old:
            if changed is value:
                changed = copy.copy(value)
            object.__setattr__(changed, field.name, new)
    return changed
