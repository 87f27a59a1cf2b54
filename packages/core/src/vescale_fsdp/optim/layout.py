"""Finds the matrices of a parameter, and which rank holds which elements of them.

A parameter of two dimensions is one matrix, or several below each other (fused projections, heads).
A parameter of more dimensions is a stack of these. A matrix has all columns of some rows, so it is
one flat range of the row-major parameter. A rank holds some *spans* of the parameter. The elements
of a span that belong to a matrix are a *part* of this matrix. Example: a stack of two matrices of
2 x 4, sharded into (6, 10) elements::

    parameter   | 0 . . . . 5 | 6 7 | 8 . . . . . . 15 |
    held by       rank 0        rank 1
    matrix 0      part of 6 elements at 0, part of 2 elements at 6
    matrix 1                          one part of 8 elements: whole on rank 1

If ``Shard`` on another axis has split the columns (tensor parallelism), a span is a rectangle: runs
of ``width`` elements, one per row. In the flat local tensor of its rank every part is one run.

Ranks that differ only along axes with ``Replicate`` are replicas and hold the same elements. Parts
are listed once, by the position of their rank within the replica.

This module uses only integers: it does not communicate or read data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat
from vescale_fsdp.ragged import Box, RaggedShard, contiguous_strides, holding_of


class Span(NamedTuple):
    """Elements that a rank holds: a run of the row-major parameter, or a rectangle in it."""

    first: int  # first element in the parameter
    local: int  # first element in the flat local tensor, in which the span is one run
    numel: int
    width: int  # elements of each run in the parameter; numel if there is one run
    stride: int  # elements from one run to the next: the columns of the parameter


class Part(NamedTuple):
    """Elements of a matrix that one rank of each replica holds."""

    position: int  # of its rank within the replica
    local: int  # first element in the rank's flat local tensor, in which the part is one run
    numel: int
    start: int  # first element in the row-major matrix
    width: int  # elements of each run in the matrix; numel if there is one run

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return these elements of a contiguous matrix as a view, [runs, width]."""
        size = (self.numel // self.width, self.width)
        return matrix.as_strided(size, (matrix.shape[-1], 1), matrix.storage_offset() + self.start)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a parameter, and its parts on ranks."""

    param: int  # index in the list of parameters
    first: int  # its first element in the row-major parameter
    rows: int
    cols: int
    parts: tuple[Part, ...]  # in the order of their first elements; together the whole matrix

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def has_runs(self) -> bool:
        """Whether its parts in their order are the row-major matrix."""
        return all(part.width == part.numel for part in self.parts)


@dataclass(frozen=True)
class Layout:
    """The distribution of a parameter over ranks.

    Args:
        shape: of the full parameter.
        placements: one per axis: ``RaggedShard``, ``Shard`` or ``Replicate``.
        mesh_shape: ranks along each axis.
        ranks: the global ranks, row-major over the axes.
    """

    shape: tuple[int, ...]
    placements: tuple[Placement, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    ranks: tuple[int, ...] = (0,)

    @property
    def members(self) -> tuple[int, ...]:
        """Return the global ranks in ascending order."""
        return tuple(sorted(self.ranks))

    def grid(self) -> tuple[tuple[int, ...], ...]:
        """Return the global rank by replica and position: ``grid[replica][position]``."""
        return _grid(tuple(p.is_replicate() for p in self.placements), self.mesh_shape, self.ranks)


@lru_cache(maxsize=64)  # the same for most parameters of a model
def _grid(
    is_replica: tuple[bool, ...], mesh_shape: tuple[int, ...], ranks: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    grid: dict[tuple[int, ...], list[int]] = {}
    coordinates = product(*map(range, mesh_shape))
    for rank, coordinate in zip(ranks, coordinates, strict=True):
        replica = tuple(c for c, alike in zip(coordinate, is_replica, strict=True) if alike)
        grid.setdefault(replica, []).append(rank)
    return tuple(map(tuple, grid.values()))


def layout_of(tensor: torch.Tensor, name: str = "the parameter") -> Layout:
    """Return the layout of a tensor. A plain tensor has a layout with rank 0 only.

    Raises:
        ValueError: a placement does not determine which rank holds which elements.
    """
    if not isinstance(tensor, DTensor):
        return Layout(tuple(tensor.shape))
    mesh = tensor.device_mesh
    order = order_of_cuts(tensor.placements, tuple(mesh.shape))
    placements = [tensor.placements[axis] for axis in order]
    placements = [Shard(p.dim) if isinstance(p, compat.StridedShard) else p for p in placements]
    for p in placements:
        if not isinstance(p, RaggedShard | Replicate) and type(p) is not Shard:
            raise ValueError(
                f"{name} has the placements {tensor.placements}; expected RaggedShard, Shard and "
                "Replicate, which say where its elements are. Redistribute it first"
            )
    return Layout(
        tuple(tensor.shape),
        tuple(placements),
        tuple(mesh.size(axis) for axis in order),
        tuple(mesh.mesh.permute(*order).flatten().tolist()),
    )


def order_of_cuts(placements: Sequence[Placement], mesh_shape: Sequence[int]) -> list[int]:
    """Return the axes in the order in which their ``Shard`` placements have split the tensor.

    The order is from left to right. But a strided placement comes after those on its right on the
    same dimension that its ``split_factor`` accounts for.
    """
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement, place = placements[axis], 0
        if isinstance(placement, compat.StridedShard):
            left = placement.split_factor
            for index, other in enumerate(order):
                if left > 1 and getattr(placements[other], "dim", None) == placement.dim:
                    left //= mesh_shape[other]
                    place = index + 1
        order.insert(place, axis)
    return order


def matrices_of(
    layout: Layout, param: int = 0, split_rows: int | Sequence[int] | None = None
) -> list[Matrix]:
    """Return the matrices of a parameter, in storage order.

    Args:
        layout: of a parameter of at least two dimensions.
        param: its index, for ``Matrix.param``.
        split_rows: if the last two dimensions are several matrices, the rows of each; one number if
            all have the same.

    Cost: O(matrices + ranks that hold elements), and O(ranks) if there are several axes.

    Raises:
        ValueError: the shape has fewer than two dimensions, or the rows do not add up.
    """
    if len(layout.shape) < 2:
        raise ValueError(f"shape {layout.shape} is no matrix: at least two dimensions are needed")
    *stack, rows, cols = layout.shape
    heights = split_heights(rows, split_rows)
    starts = list(accumulate(heights, initial=0))[:-1]
    if not math.prod(layout.shape):
        return []
    firsts = [
        (index * rows + start) * cols for index in range(math.prod(stack)) for start in starts
    ]
    numels = [height * cols for height in heights] * math.prod(stack)
    parts: list[list[Part]] = [[] for _ in firsts]
    for position, spans in spans_of(layout.shape, layout.placements, layout.mesh_shape):
        _meet(spans, firsts, numels, position, parts)
    return [
        Matrix(param, first, numel // cols, cols, tuple(sorted(found, key=lambda part: part.start)))
        for first, numel, found in zip(firsts, numels, parts, strict=True)
    ]


def split_heights(rows: int, split_rows: int | Sequence[int] | None) -> list[int]:
    """Return the rows of each matrix into which ``rows`` rows are split.

    Raises:
        ValueError: their sum is not ``rows``.
    """
    if split_rows is None:
        return [rows]
    if isinstance(split_rows, int):
        if split_rows < 1 or rows % split_rows:
            raise ValueError(f"split_rows={split_rows} does not divide {rows} rows")
        return [split_rows] * (rows // split_rows)
    heights = list(split_rows)
    if sum(heights) != rows or min(heights, default=0) < 1:
        raise ValueError(
            f"split_rows={heights} are not positive numbers that add up to {rows} rows"
        )
    return heights


def _meet(
    spans: Iterable[Span],
    firsts: list[int],
    numels: list[int],
    position: int,
    parts: list[list[Part]],
) -> None:
    """Append to the parts of each matrix its elements in ``spans``. Both are ascending."""
    index = 0
    for span in spans:
        last = span.first + (span.numel // span.width - 1) * span.stride + span.width
        while index < len(firsts) and firsts[index] + numels[index] <= span.first:
            index += 1
        at = index
        while at < len(firsts) and firsts[at] < last:
            part = _common(span, firsts[at], numels[at], position)
            if part is not None:
                parts[at].append(part)
            at += 1


def _common(span: Span, first: int, numel: int, position: int) -> Part | None:
    """Return the elements of the matrix [first, first + numel) that are in a span."""
    if span.width == span.numel:
        start = max(span.first, first)
        length = min(span.first + span.numel, first + numel) - start
        return Part(position, span.local + start - span.first, length, start - first, length)
    # A rectangle. Each of its runs is in one row, and a matrix has complete rows.
    skipped = max(0, -(-(first - span.first) // span.stride))
    runs = span.numel // span.width
    count = min(runs, -(-(first + numel - span.first) // span.stride)) - skipped
    if count <= 0:
        return None
    start = span.first + skipped * span.stride - first
    local = span.local + skipped * span.width
    return Part(position, local, count * span.width, start, span.width)


@lru_cache(maxsize=4096)
def spans_of(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
) -> tuple[tuple[int, tuple[Span, ...]], ...]:
    """Return the spans of each position within a replica, ascending; no empty positions."""
    dividing = [axis for axis, p in enumerate(placements) if not p.is_replicate()]
    if len(dividing) == 1 and isinstance(ragged := placements[dividing[0]], RaggedShard):
        return tuple(
            (position, (Span(first, 0, numel, numel, 0),))
            for position, first, numel in _ragged_ranges(ragged, shape)
        )
    found: list[tuple[int, tuple[Span, ...]]] = []
    sizes = [mesh_shape[axis] if axis in dividing else 1 for axis in range(len(mesh_shape))]
    for position, coordinate in enumerate(product(*map(range, sizes))):
        boxes = holding_of(shape, placements, mesh_shape, coordinate).boxes
        spans = tuple(_merged(span for box in boxes for span in _spans_of_box(box, shape)))
        if spans:
            found.append((position, spans))
    return tuple(found)


def _ragged_ranges(
    placement: RaggedShard, shape: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """Yield (position, first element, number of elements) of the positions with elements."""
    unit = placement.unit_numel(shape)
    position = first = 0
    for count, units in placement.runs:
        if units * unit:
            for index in range(count):
                yield position + index, first, units * unit
                first += units * unit
        position += count


def _spans_of_box(box: Box, shape: Sequence[int]) -> Iterator[Span]:
    """Yield the spans of a box of the parameter. It is row-major in the local tensor."""
    strides = contiguous_strides(shape)
    *stack, rows, width = box.sizes
    numel = rows * width
    is_run = rows == 1 or width == shape[-1]
    for number, index in enumerate(product(*map(range, stack))):
        offsets = map(int.__add__, box.offsets, (*index, 0, 0))
        first = sum(map(int.__mul__, offsets, strides))
        local = box.start + number * numel
        yield Span(first, local, numel, numel if is_run else width, 0 if is_run else shape[-1])


def _merged(spans: Iterable[Span]) -> Iterator[Span]:
    """Join spans that follow each other."""
    last: Span | None = None
    for span in spans:
        are_runs = last is not None and last.width == last.numel and span.width == span.numel
        if last is not None and are_runs and last.first + last.numel == span.first:
            numel = last.numel + span.numel
            last = last._replace(numel=numel, width=numel)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
