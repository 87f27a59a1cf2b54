"""Filling a recorded order with units that no rank has run, but may run later.

A model that drops layers at random, that routes to experts, or whose batches may hold no image, may
leave out units on all ranks while the order is recorded. They are expected where they are defined:
among the units beside them, in the order that other blocks show for the same parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vescale_fsdp.engine.order import Order

__all__ = ["Named", "fill", "is_inside", "is_like", "units_around"]

_NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Named:
    """A unit by its name in the model, ``""`` for the root."""

    name: str
    kind: str  # of its module

    @property
    def pattern(self) -> str:
        """The name without numbers: the same for the same part of all blocks."""
        return _NUMBER.sub(r"\1*", self.name)

    @property
    def parent(self) -> str:
        """The name of the module that it lies in directly."""
        return self.name.rpartition(".")[0]


def fill(
    order: Order,
    units: Sequence[Named],
    belongs: Callable[[int, set[int]], bool],
    *,
    is_backward: bool,
) -> None:
    """Insert the gathers of units that ``order`` does not have.

    Args:
        order: of a pass that all ranks have recorded.
        units: of the model, in order of definition; the order holds their indices.
        belongs: whether a unit is to be in an order that has these units.
        is_backward: whether what is defined later comes earlier, where nothing else is known.
    """
    known = set(order.gathers)
    has_grown = True
    while has_grown:
        has_grown = False
        for index in range(len(units)):
            if index not in known and belongs(index, known):
                order.insert(_place(index, order, units, is_backward), index)
                known.add(index)
                has_grown = True


def is_inside(index: int, known: set[int], units: Sequence[Named]) -> bool:
    """Whether the unit around this one is known."""
    return _around(index, units) in known


def is_like(index: int, known: set[int], units: Sequence[Named]) -> bool:
    """Whether a known unit is of the same list, or the same part of another block."""
    unit = units[index]
    others = [units[i] for i in known if units[i].name]
    return any(
        unit.pattern == other.pattern or (unit.parent == other.parent and unit.kind == other.kind)
        for other in others
    )


def _place(index: int, order: Order, units: Sequence[Named], is_backward: bool) -> int:
    """Where the gather of a unit belongs: after its siblings that come before it."""
    around = _around(index, units)
    place = 0
    if around is not None and (last := order.last(around)) is not None:
        place = last + 1
    for at, other in enumerate(order.gathers):
        sibling = _child_on_the_way(other, around, units)
        if sibling is None or sibling == index:
            continue
        if _comes_before(sibling, index, around, order, units, is_backward):
            place = max(place, at + 1)
    return place


def units_around(index: int, units: Sequence[Named]) -> list[int]:
    """The units that contain this one, outermost first."""
    inside = units[index].name
    found = [i for i, unit in enumerate(units) if i != index and _contains(unit.name, inside)]
    return sorted(found, key=lambda i: len(units[i].name))


def _around(index: int, units: Sequence[Named]) -> int | None:
    """The innermost other unit that contains this one."""
    outer = units_around(index, units)
    return outer[-1] if outer else None


def _contains(outer: str, inner: str) -> bool:
    return outer == "" or inner.startswith(f"{outer}.")


def _child_on_the_way(index: int, around: int | None, units: Sequence[Named]) -> int | None:
    """The unit directly inside of ``around`` that is or contains this one."""
    while (outer := _around(index, units)) != around:
        if outer is None:
            return None
        index = outer
    return index


def _comes_before(
    a: int, b: int, around: int | None, order: Order, units: Sequence[Named], is_backward: bool
) -> bool:
    """Whether ``a`` is gathered before ``b``: as in another block that holds the same parts."""
    runs_forward = not is_backward
    if around is not None:
        like_it = [i for i in order.gathers if units[i].pattern == units[around].pattern]
        runs_forward |= any(i in order.recomputed for i in like_it)
        skip = len(units[around].name) + 1 if units[around].name else 0
        for other in like_it:
            prefix = f"{units[other].name}."
            first = _last_of(prefix + units[a].name[skip:], order, units)
            second = _last_of(prefix + units[b].name[skip:], order, units)
            if other != around and first is not None and second is not None:
                return first < second
    return (a < b) == runs_forward


def _last_of(name: str, order: Order, units: Sequence[Named]) -> int | None:
    return next((order.last(i) for i, unit in enumerate(units) if unit.name == name), None)
