"""Bundles: neighbours in a program that are so small that they travel in one message.

A collective costs some 0.3 ms of the processor whatever it carries. So all-gathers of small units
(`policy.Policy.small_bytes`) that follow each other in a confirmed program are one: it is made when
the first of them comes, and the others find their part when they come. Reductions are one when the
last is complete::

    program     unshard a   unshard b   unshard c   unshard d        a, b, c are small
    sends       a, b and c                          d

Which ones are together follows from the program and from sizes, and from nothing that one rank
does, so it is the same on all of them. A part that is not wanted as it was sent (parameters were
written to since) is sent by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

from vescale_fsdp.program.order import Program

MOST_BYTES = 1 << 16  # of one message, for each rank

T = TypeVar("T", bound=Hashable)


class Parcel(NamedTuple):
    """Something small: bytes for each rank, and what has to be equal within a message."""

    num_bytes: int
    kind: Hashable


def bundled(items: Iterable[T], parcel_of: Callable[[T], Parcel | None]) -> list[list[T]]:
    """Runs of two and more neighbours that travel together; of what comes twice the first.

    Args:
        parcel_of: None for what has to be sent by itself.
    """
    found: list[list[T]] = []
    run: list[T] = []
    seen: set[T] = set()
    kind: Hashable = None
    num_bytes = 0
    for item in items:
        parcel = None if item in seen else parcel_of(item)
        seen.add(item)
        if parcel is None:
            found.append(run)
            run, num_bytes = [], 0
            continue
        if run and (parcel.kind != kind or num_bytes + parcel.num_bytes > MOST_BYTES):
            found.append(run)
            run, num_bytes = [], 0
        run.append(item)
        kind, num_bytes = parcel.kind, num_bytes + parcel.num_bytes
    return [each for each in (*found, run) if len(each) > 1]


class Bundles:
    """The all-gathers of one pass, as they are sent.

    Args:
        program: of the pass, confirmed.
        parcel_of: of each unit.
    """

    def __init__(self, program: Program, parcel_of: Callable[[int], Parcel | None]) -> None:
        def unless_written(unit: int) -> Parcel | None:
            return None if unit in program.written else parcel_of(unit)

        self._bundle_of = {
            unit: bundle for bundle in bundled(program.unshards, unless_written) for unit in bundle
        }
        self._sent: set[int] = set()

    def send_with(self, unit: int) -> list[int] | None:
        """What is to be sent now for ``unit``: several, itself the first.

        Nothing if it was sent with others before; None if it is to be sent by itself.
        """
        bundle = self._bundle_of.pop(unit, None)
        if bundle is None:
            return None
        if unit in self._sent:
            return []
        after = bundle[bundle.index(unit) + 1 :]
        others = [each for each in after if each in self._bundle_of and each not in self._sent]
        self._sent.update(others)
        return [unit, *others] if others else None
