"""Since: the forwards since the last backward, and the backwards since.

A backward comes back to several forwards, and may come again. What it is like, and what it
unshards, follows from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TypeAlias

from vescale_fsdp.program.names import Names
from vescale_fsdp.program.order import Program, Walk
from vescale_fsdp.program.residency import Residency

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
