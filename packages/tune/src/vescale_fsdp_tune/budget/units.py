"""The modules that may become units: the repeated blocks, or smaller ones if these are large."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getattr_static

from torch import nn

from vescale_fsdp import repeated_blocks

# Of a budget: two units are unsharded at a time, with gradients and a reduction under way.
_LARGE = 1 / 16


def divisions_to_try(
    module: nn.Module, budget_bytes: int, itemsize: int, *, has_inputs: bool = True
) -> list[list[nn.Module]]:
    """Return lists of units, without the root. The usual one first: the repeated blocks.

    Args:
        budget_bytes: of a rank. If a block takes a large part of it, its children are tried too.
        itemsize: of parameters in compute, in bytes.
        has_inputs: without them, nobody knows whether children are called.
    """
    blocks = repeated_blocks(module)
    if not has_inputs:
        return [blocks]
    largest = max((_numel(block) for block in blocks), default=0)
    outside = _numel(module) - sum(_numel(block) for block in blocks)
    if max(largest, outside) * itemsize < _LARGE * budget_bytes:
        return [blocks]
    smaller = [child for block in blocks or [module] for child in _children(block)]
    return [blocks, smaller] if len(smaller) > len(blocks) else [blocks]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules right below that have parameters and a forward, in containers too."""
    for child in module.children():
        if next(child.parameters(), None) is None:
            continue
        forward = getattr_static(type(child), "forward")
        if forward is nn.Module.forward:  # a container, as ModuleList
            yield from _children(child)
        else:
            yield child


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
