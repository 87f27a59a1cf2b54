"""What ranks exchange about a predicted pass, and the program that they make of it.

At the end of such a pass (and before, if a rank needs a unit that is not in the prediction) each
rank sends what it has used, in order. Merged, that is the program of later passes::

    predicted     a b c d e     in order of definition
    rank 0 used   a   c d       a b and e were joined for nobody, or for others
    rank 1 used   a b   d
    confirmed     a b c d       and e, if such passes may run it (`names.fill`)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from vescale_fsdp.program.order import AT_THE_END, Program

Precedence: TypeAlias = Callable[[int], list[int]]  # of a unit, among those wanted at once
# The all-gathers that a rank needed, in order; groups whose gradients are all there, each with
# after how many of those; and the rank.
Used: TypeAlias = tuple[Sequence[int], Sequence[tuple[int, int]], int]
_HELD = -1


@dataclass
class Record:
    """What one rank says, or some of them together.

    Attributes:
        step: the pass that the ranks are in, in words; the same on all.
        wants: units that ranks want next and the program has not, and whether for running their
            forward again; none: there is nothing more to run in the pass.
        used: what ranks have used; of the first of them, where several have used the same.
        recomputed: units for running their forward again.
        written: units that were written to in the pass before they ran.
        late: groups that only the end of the backward completes.
        again: groups that were reduced and have got gradients since.
        ran: units that ran in the forward, needing an all-gather or not.
        closed: units whose inputs want no gradient in the forward.
        visited: units that a backward may come back to, by what the forward returned.
        failed: whether the pass has ended by an exception.
        skips: whether a rank has left out units since the last backward.
        issued: all-gathers so far, of all models: their number and a digest.
        rank: the one that says it, the first of several.
        wrong: what is wrong, if anything.
    """

    step: str
    wants: list[tuple[int, bool]] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)
    recomputed: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    visited: list[int] = field(default_factory=list)
    failed: bool = False
    skips: bool = False
    issued: list[int] = field(default_factory=list)
    rank: int = 0
    wrong: str = ""


def merge(records: Sequence[Record]) -> Record:
    """What these ranks say together. Associative: ranks merge along a tree."""
    first = records[0]
    wrong = next((record.wrong for record in records if record.wrong), "")
    for record in records:
        if record.step != first.step:
            wrong = wrong or (
                f"rank {first.rank} is in {first.step}, rank {record.rank} in {record.step}"
            )
        elif record.issued != first.issued:
            wrong = wrong or (
                f"in {first.step} rank {first.rank} has issued {first.issued[0]} all-gathers so "
                f"far, of all models, and rank {record.rank} {record.issued[0]}, or others"
            )

    def union(name: str) -> list[int]:
        return list(dict.fromkeys(each for record in records for each in getattr(record, name)))

    wants = {tuple(each): each for record in records for each in record.wants}
    used: dict[str, Used] = {}
    for each in (each for record in records for each in record.used):
        used.setdefault(json.dumps(each[:2]), each)
    return Record(
        first.step,
        list(wants.values()),
        list(used.values()),
        union("recomputed"),
        union("written"),
        union("late"),
        union("again"),
        union("ran"),
        union("closed"),
        union("visited"),
        failed=any(record.failed for record in records),
        skips=any(record.skips for record in records),
        issued=first.issued,
        rank=first.rank,
        wrong=wrong,
    )


class CrossedError(ValueError):
    """Ranks have run units in opposite order.

    Attributes:
        ranks: two of them.
        units: the first rank has run the first one first, the other the other.
    """

    def __init__(self, ranks: tuple[int, int], units: tuple[int, int]) -> None:
        super().__init__(f"ranks {ranks} have used units {units} in opposite order")
        self.ranks, self.units = ranks, units


def program_of(
    record: Record, groups: Sequence[int], precedence: Precedence, *, holds: bool
) -> Program:
    """The program that all ranks confirm together.

    Args:
        groups: that are reduced in such a backward, in the order for those that nobody completed.
        precedence: of units that ranks want at one place, in any order: the lowest is first.
        holds: whether a rank that joins a unit which it will use itself has it from then on.

    Raises:
        CrossedError: ranks have used units in opposite order, where none holds what it joins.
    """
    unshards, places = merged(record.used, precedence, holds=holds)
    program = Program(unshards, is_confirmed=True)
    program.recomputed, program.written = set(record.recomputed), set(record.written)
    complete: dict[int, int] = {}
    for (_, completed, _), place in zip(record.used, places, strict=True):
        for group, count in completed:
            complete[group] = max(complete.get(group, 0), place[count])
    late, end = set(record.late), len(unshards)
    program.reductions = sorted(
        ((group, at) for group, at in complete.items() if group not in late),
        key=lambda each: each[1],
    )
    program.reductions += [(g, end) for g in groups if g not in complete and g not in late]
    program.reductions += [(g, AT_THE_END) for g in groups if g in late]
    return program


def merged(
    used: Sequence[Used], precedence: Precedence, *, holds: bool
) -> tuple[list[int], list[list[int]]]:
    """One sequence that has all in it, and for each how far it is after n of its entries."""
    sequences = [each for each, _, _ in used]
    if len(sequences) == 1:
        return list(sequences[0]), [list(range(len(sequences[0]) + 1))]
    merged: list[int] = []
    left = [list(each) for each in sequences]
    at, places = [0] * len(left), [[0] for _ in left]
    has: list[set[int]] = [set() for _ in left]  # what was used, or is held
    while heads := {each[k] for each, k in zip(left, at, strict=True) if k < len(each)}:
        # One that no sequence has further behind.
        free = {
            head
            for head in heads
            if not any(
                head in each[k + 1 :] and each[k] != head for each, k in zip(left, at, strict=True)
            )
        }
        if not free and not holds:
            raise _crossed(
                [(each[2], rest[k:]) for each, rest, k in zip(used, left, at, strict=True)]
            )
        unit = min(free or heads, key=precedence)
        merged.append(unit)
        for index, each in enumerate(left):
            k = at[index]
            if k < len(each) and each[k] == unit:
                at[index] += 1
                places[index].append(len(merged))
            elif holds and unit not in has[index] and unit in each[k:]:
                each[each.index(unit, k)] = _HELD
            else:
                continue
            has[index].add(unit)
        for index, each in enumerate(left):
            while at[index] < len(each) and each[at[index]] == _HELD:  # since it was joined
                at[index] += 1
                places[index].append(len(merged))
    return merged, places


def _crossed(sequences: Sequence[tuple[int, Sequence[int]]]) -> CrossedError:
    """Two ranks, and units that they have in opposite order, of which each is first on one."""
    for (one, first), (other, second) in itertools.permutations(sequences, 2):
        if first and second and first[0] in second[1:] and second[0] in first[1:] and one < other:
            return CrossedError((one, other), (first[0], second[0]))
    (one, first), (other, second) = [each for each in sequences if each[1]][:2]
    return CrossedError((one, other), (first[0], second[0]))
