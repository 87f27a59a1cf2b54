"""Which parts of a model to make units of, when the user does not say."""

from __future__ import annotations

from collections import Counter

from torch import nn


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: what most people would call ``fully_shard`` on.

    Modules whose class the model names in ``_no_split_modules`` (as ``transformers`` does), or
    else the members of each ``ModuleList`` or ``Sequential`` that holds several parametrized
    modules of one class. Blocks inside blocks are not looked for.
    """
    names = {
        name
        for child in module.modules()
        for name in (getattr(child, "_no_split_modules", None) or ())
    }
    found: dict[int, nn.Module] = {}
    _collect(module, names, set(), found)
    return list(found.values())


def _collect(
    current: nn.Module, names: set[str], seen: set[int], found: dict[int, nn.Module]
) -> None:
    repeated = _repeated_classes(current)
    for child in current.children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        is_block = type(child).__name__ in names if names else type(child) in repeated
        if is_block and _has_parameters(child):
            found[id(child)] = child
        else:
            _collect(child, names, seen, found)


def _repeated_classes(container: nn.Module) -> set[type]:
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return set()
    counts = Counter(
        type(child) for child in container.children() if next(child.parameters(), None) is not None
    )
    containers = (nn.ModuleList, nn.ModuleDict)
    return {cls for cls, count in counts.items() if count > 1 and not issubclass(cls, containers)}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
