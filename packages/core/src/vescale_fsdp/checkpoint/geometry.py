"""Do boxes tile a tensor, and do spans tile a file? Integers only.

A box is (offsets, sizes). Boxes of which no two overlap, and which together have as many elements
as the tensor, cover it.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence

__all__ = ["boxes_fault", "spans_fault"]

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Why the boxes do not tile a tensor of this shape; empty if they do.

    Cost: sorting, and for each box a look at those that share its range along the longest
    dimension.
    """
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"the box at {list(offsets)} has not the {len(shape)} dimensions of the tensor"
        if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return f"the box at {list(offsets)} of {list(sizes)} sticks out of {list(shape)}"
    held = sum(math.prod(sizes) for _, sizes in boxes)
    if held != math.prod(shape):
        return f"its boxes hold {held} elements, expected {math.prod(shape)}"
    pair = _overlapping(shape, [box for box in boxes if math.prod(box[1])])
    return f"its boxes at {list(pair[0][0])} and {list(pair[1][0])} overlap" if pair else ""


def _overlapping(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    if not shape:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    longest = max(range(len(shape)), key=lambda dim: shape[dim])
    active: list[tuple[int, Box]] = []  # by where they end
    for box in sorted(boxes, key=lambda box: box[0][longest]):
        start = box[0][longest]
        del active[: bisect_right(active, start, key=lambda entry: entry[0])]
        for _, other in active:
            if _overlap(box, other):
                return other, box
        insort(active, (start + box[1][longest], box))
    return None


def _overlap(a: Box, b: Box) -> bool:
    return all(x < y + t and y < x + s for x, s, y, t in zip(a[0], a[1], b[0], b[1], strict=True))


def spans_fault(num_bytes: int, spans: Iterable[tuple[int, int, str]]) -> str:
    """Why spans (first byte, number of bytes, label) do not tile a file; empty if they do."""
    end, last = 0, "its beginning"
    for start, length, label in sorted(spans):
        if length == 0 and start <= num_bytes:
            continue
        if start < end:
            return f"{label} overlaps {last}"
        if start > end:
            return f"bytes {end} to {start}, between {last} and {label}, belong to nothing"
        end, last = start + length, label
        if end > num_bytes:
            return f"{label} ends at byte {end} of {num_bytes}"
    return "" if end == num_bytes else f"bytes {end} to {num_bytes} belong to nothing"
