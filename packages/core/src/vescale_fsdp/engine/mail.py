"""Mail: the small all-gathers of one pass, several in one message (`program.order`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vescale_fsdp.dbuffer import Comm, GatherMessage, ThenCopy
from vescale_fsdp.engine.unit import Unit
from vescale_fsdp.program.order import Bundles, Parcel, Program


class _Letter(NamedTuple):
    """A unit's part of a message."""

    message: GatherMessage
    first: int  # of its buffers in the message
    version: list[tuple[int, int]]  # of what was sent


class Mail:
    """What is sent together in a pass along a confirmed program.

    Args:
        units: of the model, by their indices.
        comm: of all of them.
        small_bytes: of a unit that may be sent with others, at most, for each rank.
        when_stale: called before a unit is sent once more, alone, as its parameters were written to
            since the message.
    """

    def __init__(
        self,
        program: Program,
        units: Sequence[weakref.ref[Unit]],
        comm: Comm,
        when_stale: Callable[[Unit], object],
        *,
        small_bytes: float,
        in_backward: bool,
    ) -> None:
        self._units, self._comm, self._when_stale = units, comm, when_stale
        self._small_bytes, self._in_backward = small_bytes, in_backward
        self._letters: dict[int, _Letter] = {}  # by unit
        self._bundles = Bundles(program, self._parcel_of)

    def _parcel_of(self, index: int) -> Parcel | None:
        unit = self._units[index]()
        if unit is None or (self._in_backward and unit.num_parts > 1):
            return None
        if not all(group.travels_plainly for group in unit.groups):
            return None
        buffers = [group.buffer for group in unit.groups]
        sizes = [each.layout.shard_size * each.full_dtype.itemsize for each in buffers]
        return Parcel(sum(sizes), None) if 0 < sum(sizes) <= self._small_bytes else None

    def fetch(self, unit: Unit) -> list[ThenCopy] | None:
        """Start the all-gather of ``unit``; returns what to wait for, for each group.

        None if it has to be sent alone.
        """
        together = self._bundles.send_with(unit.index)
        if together is None:
            return None
        if together:
            self._send(together)
        letter = self._letters.pop(unit.index)
        if letter.version == unit.version:
            groups = enumerate(unit.groups, letter.first)
            return [letter.message.take(index, group.buffer) for index, group in groups]
        self._return(letter, len(unit.groups))
        self._when_stale(unit)
        return None

    def _send(self, indices: list[int]) -> None:
        units = [unit for index in indices if (unit := self._units[index]()) is not None]
        groups = [group for unit in units for group in unit.groups]
        for group in groups:
            group.follow_conversions()
        self._comm.issued.subject = units[0].tag
        message = GatherMessage([group.buffer for group in groups], self._comm, groups[0].pool)
        first = 0
        for unit in units:
            self._letters[unit.index] = _Letter(message, first, unit.version)
            first += len(unit.groups)

    def _return(self, letter: _Letter, num_buffers: int) -> None:
        letter.message.wait()
        for _ in range(num_buffers):
            letter.message.drop()

    def close(self) -> None:
        """The pass has ended: what nobody wanted has arrived, too."""
        while self._letters:
            index, letter = self._letters.popitem()
            unit = self._units[index]()
            self._return(letter, 0 if unit is None else len(unit.groups))
