"""A tree over ranks, along which a few messages of each reach all, with a wide fan-in.

Ranks are numbered from 0, the root. The subtree of each is a run of numbers that begins with its
own: who puts what its children have after what it has itself, has all in the order of ranks. Seven
ranks, with a fan-in of two::

    0 --+-- 1 --+-- 2
        |       +-- 3
        +-- 4 --+-- 5
                +-- 6
"""

from __future__ import annotations

FAN_IN = 16


class MergeTree:
    """Who waits for whom. As shallow as the fan-in allows; subtrees are full, but for the last."""

    def __init__(self, size: int, fan_in: int = FAN_IN) -> None:
        self._size, self._fan_in = size, fan_in
        self._width = 1  # of the subtrees of the root's children
        while 1 + fan_in * self._width < size:
            self._width = 1 + fan_in * self._width

    def parent(self, number: int) -> int | None:
        """None for the root. O(depth)."""
        return self._place(number)[0]

    def children(self, number: int) -> range:
        """At most ``fan_in`` of them, ascending. O(depth)."""
        return self._place(number)[1]

    def _place(self, number: int) -> tuple[int | None, range]:
        parent, start, stop, width = None, 0, self._size, self._width
        while start != number:
            parent = start
            start += 1 + (number - start - 1) // width * width
            stop = min(start + width, stop)
            width = (width - 1) // self._fan_in
        return parent, range(start + 1, stop, max(width, 1))
