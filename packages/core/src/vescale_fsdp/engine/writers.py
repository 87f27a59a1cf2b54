"""Which modules may write to ``p.data`` in their forward.

``p.data.mul_(0.5)`` raises no version of ``p``, so only a comparison of the parameters with the
shard tells that they were written to. It costs 1% of a step, and is made for units in whose forward
the name ``data`` occurs: in the code of ``forward``, of hooks around it, and of methods and
functions that they call by their names, also in base classes, but not in torch's. A codebook that
follows its inputs, and weights that are normalized before they are used, are such.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from vescale_fsdp.engine.unit import Unit, unit_of


def expose_if_written(unit: Unit) -> None:
    """Let the unit be compared with its shard at its end, if its forward may write to ``.data``."""
    if unit.writes_data is None:
        unit.writes_data = may_write_data(unit)
    if unit.writes_data:
        for group in unit.groups:
            group.is_exposed = True


def may_write_data(unit: Unit) -> bool:
    """Whether a forward of the unit's own modules mentions ``data``."""
    pending: list[nn.Module] = unit.modules()
    seen: set[int] = set()
    while pending:
        module = pending.pop()
        own = "forward" in vars(module)  # replaced on this module only
        if id(module) in seen or unit_of(module) not in (None, unit):
            continue
        seen.add(id(module))
        others: list[Any] = [module.forward] if own else []
        others += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        kind: Any = type(module)
        if _mentions_data(kind) or any(_reaches_data(each, kind) for each in others):
            return True
        pending += module.children()
    return False


@functools.cache
def _mentions_data(kind: Any) -> bool:
    # Statically: that of a scripted module cannot be read from its class.
    return _reaches_data(inspect.getattr_static(kind, "forward"), kind)


def _reaches_data(forward: Any, kind: type[nn.Module]) -> bool:
    pending: list[Any] = [forward]
    seen: set[int] = set()
    while pending:
        function = _function_of(pending.pop())
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        if (function.__module__ or "").partition(".")[0] in ("torch", "vescale_fsdp"):
            continue
        names = set(_names_in(function.__code__))
        if "data" in names:
            return True
        for name in names:
            pending += [vars(each)[name] for each in kind.__mro__ if name in vars(each)]
            pending.append(function.__globals__.get(name))
    return False


def _function_of(found: Any) -> FunctionType | None:
    """Return what a name calls. Other objects are not touched: theirs may be any attributes."""
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, staticmethod | classmethod | MethodType):
        found = found.__func__
    found = inspect.unwrap(found) if isinstance(found, FunctionType) else None
    return found if isinstance(found, FunctionType) else None


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
