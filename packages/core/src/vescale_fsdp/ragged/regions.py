"""A flat range of a tensor as axis-aligned boxes, for formats that only know boxes.

A range of a row-major tensor is at most ``2 * ndim - 1`` boxes: a ragged start, whole slices,
a ragged end, and the same again one dimension deeper. For shape (4, 5), range [3, 18)::

    . . . A A      A: offsets (0, 3), sizes (1, 2)
    B B B B B      B: offsets (1, 0), sizes (2, 5)
    B B B B B
    C C C . .      C: offsets (3, 0), sizes (1, 3)

The boxes come in storage order, and each of them is contiguous in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


class Box(NamedTuple):
    """An axis-aligned part of a tensor, with the place of its first element in the range."""

    offsets: tuple[int, ...]  # one per dimension of the tensor
    sizes: tuple[int, ...]  # one per dimension of the tensor
    start: int  # first element, counted from the start of the range

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of this part of a tensor that has all dimensions."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


def flat_range_to_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cover the half-open flat range [start, stop) of a row-major tensor exactly once.

    Returns an empty list for an empty range. A scalar (shape ``()``) is one box without sizes.
    """
    assert 0 <= start <= stop <= math.prod(shape), "the range must lie in the tensor"
    boxes: list[Box] = []
    _append_boxes(boxes, tuple(shape), start, stop, (), 0)
    return boxes


def intersection(first: Box, second: Box) -> Box | None:
    """The elements that lie in both boxes; ``start`` is that of ``first``. None if there are none.

    The result is a box inside ``first``, not always contiguous there.
    """
    offsets = tuple(map(max, first.offsets, second.offsets))
    sizes = tuple(
        min(first.offsets[d] + first.sizes[d], second.offsets[d] + second.sizes[d]) - offsets[d]
        for d in range(len(offsets))
    )
    return Box(offsets, sizes, first.start) if all(size > 0 for size in sizes) else None


def _append_boxes(
    boxes: list[Box],
    shape: tuple[int, ...],
    start: int,
    stop: int,
    outer: tuple[int, ...],
    done: int,
) -> None:
    """Append the boxes of [start, stop) in the slice at ``outer``; ``done`` elements precede."""
    if start == stop:
        return
    ones = (1,) * len(outer)
    if not shape:
        boxes.append(Box(outer, ones, done))
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole slices are [first, last)
    if first > last:  # the range lies inside one slice
        base = last * inner
        _append_boxes(boxes, shape[1:], start - base, stop - base, (*outer, last), done)
        return
    head = first * inner - start
    if head:
        _append_boxes(boxes, shape[1:], inner - head, inner, (*outer, first - 1), done)
        done += head
    if last > first:
        rest = (0,) * (len(shape) - 1)
        boxes.append(Box((*outer, first, *rest), (*ones, last - first, *shape[1:]), done))
        done += (last - first) * inner
    _append_boxes(boxes, shape[1:], 0, stop - last * inner, (*outer, last), done)
