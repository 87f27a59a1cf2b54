"""Granularity: the smallest part of a parameter that must stay on one rank.

A granularity turns the shape of a parameter into the planner's block, in elements. A row is a
run along the last dimension (of a vector: one element). Blocks are anchored at the first element
of the tensor; the last one may be partial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

_Part = tuple[str, int]


@dataclass(frozen=True)
class Granularity:
    """A need for whole blocks. Made by `elements`, `rows`, `tile` and `whole`."""

    _parts: tuple[_Part, ...]

    @classmethod
    def elements(cls, n: int) -> Granularity:
        """Blocks of ``n`` consecutive elements (1: split anywhere)."""
        return cls((("elements", _positive("elements", n)),))

    @classmethod
    def rows(cls, n: int) -> Granularity:
        """Blocks of ``n`` rows."""
        return cls((("rows", _positive("rows", n)),))

    @classmethod
    def tile(cls, r: int, c: int) -> Granularity:
        """Tiles of r x c in the last two dimensions.

        A tile is not contiguous: what must stay together are the r rows that it spans. If r does
        not divide the second-last dimension of a stack of matrices, whole matrices stay together.
        """
        _positive("tile columns", c)
        return cls((("tile", _positive("tile rows", r)),))

    @classmethod
    def whole(cls) -> Granularity:
        """The tensor is never split."""
        return cls((("whole", 1),))

    def block(self, shape: Sequence[int]) -> int:
        """The block for a tensor of ``shape``, in elements: between 1 and its numel."""
        numel = math.prod(shape)
        if numel == 0:
            return 1
        return min(math.lcm(*(_block(part, tuple(shape)) for part in self._parts)), numel)


GranularityPolicy: TypeAlias = Callable[[str, nn.Parameter], Granularity | None]


def combine(*policies: Granularity | GranularityPolicy | None) -> GranularityPolicy:
    """A policy that satisfies all of ``policies``: the least common multiple of their blocks."""
    for policy in policies:
        check_granularity(policy)

    def combined(fqn: str, param: nn.Parameter) -> Granularity | None:
        needs = [need for policy in policies if (need := _need(policy, fqn, param)) is not None]
        if not needs:
            return None
        return Granularity(tuple(part for need in needs for part in need._parts))

    return combined


def check_granularity(granularity: object) -> None:
    """Raise where ``granularity`` is neither a Granularity nor a policy."""
    if granularity is None or isinstance(granularity, Granularity) or callable(granularity):
        return
    if isinstance(granularity, int):
        raise TypeError(
            f"granularity={granularity} does not say what it counts; use "
            f"Granularity.elements({granularity}) or Granularity.rows({granularity})"
        )
    raise TypeError(
        "granularity must be a Granularity, or a policy (fqn, param) -> Granularity | None, got "
        f"{type(granularity).__name__}"
    )


def block_of(
    granularity: Granularity | GranularityPolicy | None,
    fqn: str,
    param: nn.Parameter,
    shape: Sequence[int] | None = None,
) -> int:
    """The planner's block for one parameter, in elements.

    ``shape`` is what there is to cut of it, if an inner parallelism has cut it before.
    """
    return asked_block(granularity, fqn, param, shape) or 1


def asked_block(
    granularity: Granularity | GranularityPolicy | None,
    fqn: str,
    param: nn.Parameter,
    shape: Sequence[int] | None = None,
) -> int | None:
    """As `block_of`; None if nothing is asked for."""
    need = _need(granularity, fqn, param)
    return None if need is None else need.block(param.shape if shape is None else shape)


def _need(
    granularity: Granularity | GranularityPolicy | None, fqn: str, param: nn.Parameter
) -> Granularity | None:
    if granularity is None or isinstance(granularity, Granularity):
        return granularity
    need = granularity(fqn, param)
    if need is not None and not isinstance(need, Granularity):
        raise TypeError(
            f"the granularity policy returned {need!r} for {fqn!r}; expected a Granularity or None"
        )
    return need


def _block(part: _Part, shape: tuple[int, ...]) -> int:
    kind, count = part
    numel = math.prod(shape)
    if kind == "elements":
        return count
    if kind == "whole":
        return numel
    row = shape[-1] if len(shape) >= 2 else 1
    if kind == "tile" and len(shape) >= 3 and shape[-2] % count:
        return shape[-2] * row
    return count * row


def _positive(what: str, n: int) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"Granularity: the number of {what} must be a positive int, got {n!r}")
    return n
