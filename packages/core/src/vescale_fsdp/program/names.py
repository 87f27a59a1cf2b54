"""Units by their names: which is in which, and where one that nobody has run would come.

A model that drops layers at random, that routes to experts, or whose batches may hold no image, may
leave out units on all ranks while a program is confirmed. They are expected where they are defined:
among the units beside them, in the order that other blocks show for the same parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Set

from vescale_fsdp.program.order import Program

_NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")


class Names:
    """The units of a model by their names (``""`` for the root), in order of definition.

    Args:
        names: of the units in the model.
        kinds: the classes of their modules.
        empty: those that have no parameters, and so no place in a program.
    """

    def __init__(
        self, names: Sequence[str], kinds: Sequence[str], empty: Set[int] = frozenset()
    ) -> None:
        self.empty = empty
        self.names = list(names)
        self.patterns = [_NUMBER.sub(r"\1*", name) for name in names]
        self._lists = [
            (name.rpartition(".")[0], kind) for name, kind in zip(names, kinds, strict=True)
        ]
        every = {name: index for index, name in enumerate(names)}
        self.containers: list[list[int]] = []  # the units around each, outermost first
        for name in names:
            parts = name.split(".")
            outer = ["", *(".".join(parts[:n]) for n in range(1, len(parts)))] if name else []
            self.containers.append([every[each] for each in outer if each in every])
        self.paths = [  # those with a place in a program
            [each for each in containers if each not in empty] for containers in self.containers
        ]
        self.index_of = {name: index for name, index in every.items() if index not in empty}

    def title(self, index: int) -> str:
        """Of a unit, in errors."""
        return self.names[index] or "the root"

    def around(self, index: int) -> int | None:
        """The innermost other unit that contains this one."""
        path = self.paths[index]
        return path[-1] if path else None

    def within(self, first: int) -> list[int]:
        """A unit and those in it, in order of definition, but for empty ones."""
        name = self.names[first]
        return [
            index
            for index, each in enumerate(self.names)
            if index not in self.empty
            and (index == first or not name or each.startswith(f"{name}."))
        ]

    def like(self, units: Set[int]) -> set[int]:
        """These units, and the same parts of other blocks."""
        patterns = {self.patterns[unit] for unit in units}
        return {unit for unit, each in enumerate(self.patterns) if each in patterns}

    def is_like(self, index: int, known: set[int]) -> bool:
        """Whether a known unit is of the same list, or the same part of another block."""
        return any(
            self.names[other]
            and (
                self.patterns[other] == self.patterns[index]
                or self._lists[other] == self._lists[index]
            )
            for other in known
        )


def fill(order: Program, names: Names, belongs: Callable[[int, set[int]], bool]) -> None:
    """Insert the units that ``order`` does not have.

    Args:
        order: of a forward that all ranks have confirmed; it holds indices of ``names``.
        names: of the units of the model.
        belongs: whether a unit is to be in an order that has these units.
    """
    known = set(order.unshards)
    has_grown = True
    while has_grown:
        has_grown = False
        for index in range(len(names.names)):
            if index not in known and index not in names.empty and belongs(index, known):
                order.insert(_place(index, order, names), index)
                known.add(index)
                has_grown = True


def _place(index: int, order: Program, names: Names) -> int:
    """Where the gather of a unit belongs: after its siblings that come before it."""
    path = names.paths[index]
    around, depth = names.around(index), len(path)
    last = None if around is None else order.last(around)
    place = 0 if last is None else last + 1
    comes_before: dict[int, bool] = {}  # of each sibling
    for at, other in enumerate(order.unshards):
        way = [*names.paths[other], other]
        if way[:depth] != path or len(way) == depth:
            continue
        sibling = way[depth]
        if sibling not in comes_before:
            comes_before[sibling] = sibling != index and _comes_before(
                sibling, index, around, order, names
            )
        if comes_before[sibling]:
            place = max(place, at + 1)
    return place


def _comes_before(a: int, b: int, around: int | None, order: Program, names: Names) -> bool:
    """Whether ``a`` is gathered before ``b``: as in another block that holds the same parts."""
    if around is not None:
        pattern, outer = names.patterns[around], names.names[around]
        skip = len(outer) + 1 if outer else 0
        for other in dict.fromkeys(order.unshards):
            if names.patterns[other] == pattern and other != around:
                prefix = f"{names.names[other]}."
                first = _last(prefix + names.names[a][skip:], order, names)
                second = _last(prefix + names.names[b][skip:], order, names)
                if first is not None and second is not None:
                    return first < second
    return a < b


def _last(name: str, order: Program, names: Names) -> int | None:
    index = names.index_of.get(name)
    return None if index is None else order.last(index)
