"""Do boxes tile a tensor, and do spans tile a file? Where do boxes lie? Integers only.

A box is (offsets, sizes). Boxes of which no two overlap, and which together have as many elements
as the tensor, cover it.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Protocol

Box = tuple[tuple[int, ...], tuple[int, ...]]


class _Span(Protocol):
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


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


def spans_tile(num_bytes: int, spans: Iterable[_Span]) -> bool:
    """Whether spans, by where they begin, tile a file. Spans of no bytes may be anywhere."""
    end = 0
    for span in spans:
        if span.length:
            if span.offset != end:
                return False
            end += span.length
    return end == num_bytes


def runs_of(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Where the elements of a box lie in a row-major tensor: (first, length), in their order.

    As few as there can be: a box of whole rows is one run. For shape (4, 5), columns 1 and 2 of the
    rows 1 and 2 are (6, 2) and (11, 2).
    """
    if not math.prod(sizes):
        return
    inner = len(shape)  # dimensions from here on are whole
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    run_dim = max(inner - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(sizes[run_dim:])
    base = sum(o * stride for o, stride in zip(offsets, strides, strict=True))
    for index in product(*(range(size) for size in sizes[:run_dim])):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False)), length
