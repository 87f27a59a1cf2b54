"""What a pass will issue, before any rank has run one of its kind.

A forward runs its units in order of definition, or as a forward of the same unit did before. A
backward comes back to what its forward has run, the last first. Where that is not what happens,
ranks tell each other (`record`), one round for each difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from vescale_fsdp.program.names import Names
from vescale_fsdp.program.order import AT_THE_END, Program
from vescale_fsdp.program.record import Precedence


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
