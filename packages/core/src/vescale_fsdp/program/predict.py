"""What a pass will issue, before any rank has run one of its kind.

A forward runs its units in order of definition, or as a forward of the same unit did before. A
backward returns to the forwards since the last backward (`Since`), the last first; it may return to
several, and several times. Where that is not what happens, ranks tell each other (`record`), one
round for each difference.

All ranks may leave out units while a program is confirmed: a model may drop layers at random, route
to experts, or get batches without an image. Such units are expected where they are defined: among
the units beside them, in the order that other blocks show for the same parts. Units are compared
by their names.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TypeAlias

from vescale_fsdp.program.order import AT_THE_END, Program, Walk
from vescale_fsdp.program.record import Precedence
from vescale_fsdp.program.residency import Residency

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


def continued(names: Names, first: int, unit: int, used: Set[int]) -> list[int]:
    """What comes after ``unit``, which was not predicted, in a forward that has used others."""
    return [each for each in names.within(first) if each > unit and each not in used]


def backward_precedence(names: Names, forward: Program, recomputed: Set[int]) -> Precedence:
    """Last is first, but in a unit whose forward runs again what comes first is first."""

    def precedence(unit: int) -> list[int]:
        path = names.paths[unit]
        places = [forward.last(each) or 0 for each in (*path, unit)]
        runs_forward = [False, *(each in recomputed for each in path)]
        return [at if plus else -at for at, plus in zip(places, runs_forward, strict=True)]

    return precedence


def insert_by(precedence: Precedence, program: Program, units: Iterable[int]) -> None:
    """Insert the units that the program of a backward does not have, where they would come."""
    for unit in units:
        if program.last(unit) is None:
            mine = precedence(unit)
            before = [at for at, each in enumerate(program.unshards) if precedence(each) < mine]
            program.insert(before[-1] + 1 if before else 0, unit)


def reduce_not_before(
    precedence: Precedence,
    program: Program,
    unit_of: Mapping[int, int],
    names: Names,
    forward: Program,
) -> None:
    """Reduce no group before the place where a rank that runs all units would complete it.

    That is after the all-gathers of what is in its unit; where several units run their forward
    again one after the other, after those of all of them; and of a unit that was kept, and has no
    all-gather of its own, after those of all that the backward comes to before it.
    """
    places: dict[int, int] = {}  # of each unit: after all-gathers of those in it
    end = len(program.unshards)

    def runs_again(unit: int) -> bool:
        return any(each in program.recomputed for each in (*names.paths[unit], unit))

    for place in range(end - 1, 0, -1):
        unit, after = program.unshards[place - 1 : place + 1]
        is_next = (forward.last(after) or 0) > (forward.last(unit) or 0)
        if is_next and runs_again(unit) and runs_again(after):
            places.setdefault(unit, max(places.get(after, 0), place + 1))
    for place, unit in enumerate(program.unshards, 1):
        for around in names.paths[unit]:
            places[around] = max(places.get(around, 0), place, places.get(unit, 0))
    moved = []
    for group, at in program.reductions:
        unit = unit_of[group]
        if program.last(unit) is None:
            mine = precedence(unit)
            before = [n for n, each in enumerate(program.unshards, 1) if precedence(each) < mine]
            at = max(at, *before[-1:], 0)
        moved.append((group, max(at, places.get(unit, 0))))
    program.reductions = sorted(moved, key=lambda each: each[1])


def predicted_backward(
    names: Names,
    forward: Program,
    comes_back: Callable[[int], bool],
    due: Iterable[tuple[int, int]],
    closed: Set[int],
) -> Program:
    """The program of the backward after ``forward``.

    A group is reduced when its unit and all in it have been unsharded and have run; where inputs
    want no gradient (``closed``), when the backward ends.

    Args:
        comes_back: whether the backward unshards a unit of the forward.
        due: groups that are reduced, each with its unit, those that are defined last first.
    """
    units = filter(comes_back, dict.fromkeys(forward.unshards))
    program = Program(sorted(units, key=backward_precedence(names, forward, frozenset())))
    places: dict[int, int] = {}  # of each unit: after all-gathers of it and of those in it
    for place, unit in enumerate(program.unshards, 1):
        for around in (*names.paths[unit], unit):
            places[around] = place
    end = len(program.unshards)
    reductions = [
        (group, AT_THE_END if unit in closed else places.get(unit, end)) for group, unit in due
    ]
    program.reductions = sorted(reductions, key=lambda each: each[1])
    return program


Kind: TypeAlias = tuple[int, str, bool]  # first unit, its method, whether gradients are wanted
# Of the last forward; forwards since the last backward; backwards since; groups due; units kept.
BackKind: TypeAlias = tuple[Kind, int, int, tuple[int, ...], tuple[int, ...]]
_MAX_FORWARDS = 4  # before a backward, whose program is another with each; more are as so many
_MAX_BACKWARDS = 3  # after one forward, with programs of their own; later ones follow the last


class Since:
    """What one rank, or any, has done since the last backward.

    Attributes:
        kind, forward: of the last pass that wanted gradients.
        hidden: units that gradients may come to by no call in the graph.
        ran: units, on this rank.
        ran_anywhere: units, in the forward of what was confirmed last.
        num_forwards: with gradients, since the last backward.
        has_skipped: whether this rank, or any, has left out units in them.
        num_backwards: since the last of them.
    """

    def __init__(self, units: Sequence[weakref.ref[Residency]], names: Names) -> None:
        self._units, self._names = units, names
        self.kind: Kind = (0, "", True)
        self.forward = Walk(Program())
        self.hidden: set[int] = set()
        self.ran: set[int] = set()
        self.ran_anywhere: set[int] = set()
        self.num_forwards = self.num_backwards = 0
        self.has_skipped = False

    def begin_forward(self, kind: Kind, walk: Walk) -> None:
        """A forward begins that wants gradients."""
        self.kind, self.forward = kind, walk
        if self.num_backwards:
            self.forget()
        self.num_forwards += 1
        self.num_backwards = 0

    def forget(self) -> None:
        """What has run is over, or was broken off."""
        self.num_forwards, self.has_skipped = 0, False
        self.ran, self.hidden = set(), set()

    def kind_of_backward(self, due: tuple[int, ...]) -> BackKind:
        """That of the backward that begins, which reduces the groups ``due``."""
        kept = tuple(unit.index for unit in self._alive() if unit.keeps_after_forward(True))
        forwards = min(self.num_forwards, _MAX_FORWARDS)
        return self.kind, forwards, min(self.num_backwards, _MAX_BACKWARDS), due, kept

    def _alive(self) -> list[Residency]:
        return [unit for ref in self._units if (unit := ref()) is not None]

    def gets_nothing(self, unit: Residency, backward: Walk) -> bool:
        """Whether no gradient of a unit can come any more: it has not run, or its graph is gone."""
        index = unit.index
        if unit.awaits_backward:
            return False
        if index not in self.ran and index not in backward.ran:
            return True
        if self.num_backwards:  # of one graph: no call is open before it is reached
            return False
        containers = self._names.containers[index]
        around = (self._units[each]() for each in containers if each in self.ran)
        return index not in self.hidden or any(
            unit is not None and unit.index not in self.hidden and not unit.awaits_backward
            for unit in around
        )

    def may_run(self, index: int, known: set[int], *, by_path: bool) -> bool:
        """Whether a later forward like the last, that has the ``known`` units, may run another.

        Args:
            by_path: if what is around it runs; if not (a method for a part of the model), if it is
                like one that does.
        """
        known = known | self.ran_anywhere  # some were kept, and needed no all-gather
        if index in known:
            return True
        if by_path:
            around = self._names.around(index)
            return around is None or around in known
        return self._names.is_like(index, known)

    def may_come_back(self, index: int) -> bool:
        """Whether a later backward may unshard a unit that this one did not need."""
        # A frozen one that has run, and that no backward asked for: its inputs want no gradient.
        # They may where ranks leave out what comes before it.
        return self._is_unsharded_again(index) and (
            self._is_trainable(index) or self.has_skipped or index not in self.ran_anywhere
        )

    def comes_back(self, index: int, visited: set[int] | None) -> bool:
        """Whether the backward is predicted to unshard a unit of its forward.

        Args:
            visited: units that a backward may come back to, where that is known.
        """
        if not self._is_unsharded_again(index):
            return False
        return visited is None or index in visited or self._is_trainable(index)

    def _is_unsharded_again(self, index: int) -> bool:
        unit = self._units[index]()
        if unit is None or self.forward.program.last(index) is None:
            return False
        is_kept = unit.keeps_after_forward(True) and not self.num_backwards  # the first frees it
        return unit.unshard_in_backward and not is_kept

    def _is_trainable(self, index: int) -> bool:
        unit = self._units[index]()
        return unit is not None and unit.trainable
