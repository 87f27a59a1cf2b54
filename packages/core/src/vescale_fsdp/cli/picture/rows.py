"""What the picture shows of a layout, in integers: segments of the buffer, and rows of ranks.

The layout of ``planner``'s example, S = 6, as segments (``.`` is padding) and as rows::

    buffer   . . a a a a | a a a a b b | b . c c c c | c c c c c c
    segments [0, 2) padding, [2, 10) a, [10, 13) b, [13, 14) padding, [14, 24) c
    row 0    padding at [0, 2), a at [2, 6)
    row 1    a at [0, 4), b at [4, 6)
    ...

With many ranks, neighbours that look the same share a row, so there are about as many rows as
tensors, whatever the number of ranks. Where these are too many as well, ``choose`` keeps the
telling ones and says what lies between them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vescale_fsdp.planner import ShardLayout


@dataclass(frozen=True)
class PictureGroup:
    """One buffer to draw, and the line above it."""

    title: str
    layout: ShardLayout


class Segment(NamedTuple):
    """A run of the buffer: a whole tensor, or the padding between two."""

    start: int  # in elements of the buffer
    stop: int
    tensor: int | None  # into the layout's specs; None for padding


class Piece(NamedTuple):
    """What one shard holds of a segment."""

    start: int  # in elements of the shard
    stop: int
    tensor: int | None  # into the layout's specs; None for padding
    skipped: int  # elements of the segment that lie on ranks before


class Row(NamedTuple):
    """One rank, or a run of ranks whose shards look the same."""

    first: int
    last: int  # the last rank of the run, included
    pieces: tuple[Piece, ...]  # of the first rank; they cover [0, S)
    same_tensors: bool  # all ranks hold the first one's tensors, not only their like

    @property
    def num_ranks(self) -> int:
        """How many ranks this row stands for."""
        return self.last - self.first + 1


class Gap(NamedTuple):
    """Ranks that have no row: they are only counted."""

    first: int
    last: int  # included
    padding: int  # elements, of all these ranks together

    @property
    def num_ranks(self) -> int:
        """How many ranks are left out."""
        return self.last - self.first + 1


def segments_of(layout: ShardLayout) -> list[Segment]:
    """The buffer from its first to its last element, none of them twice. O(tensors)."""
    segments = []
    position = 0
    for index in sorted(range(len(layout.specs)), key=layout.offsets.__getitem__):
        start, numel = layout.offsets[index], layout.specs[index].numel
        if numel == 0:
            continue
        if start > position:
            segments.append(Segment(position, start, None))
        segments.append(Segment(start, start + numel, index))
        position = start + numel
    if position < layout.total_size:
        segments.append(Segment(position, layout.total_size, None))
    return segments


def rows_of(
    layout: ShardLayout, segments: Sequence[Segment], kinds: Sequence[str], *, merge: bool
) -> list[Row]:
    """The ranks in order, one row each, or one per run of ranks that look the same if ``merge``.

    ``kinds`` has one name per tensor: ranks look the same if they hold tensors of the same kinds
    at the same places. O(tensors + rows), whatever the number of ranks.
    """
    size = layout.shard_size
    rows: list[Row] = []
    rank = at = 0
    while rank < layout.num_shards and size:
        start = rank * size
        while segments[at].stop <= start:
            at += 1
        last = rank
        if merge:  # a tensor that fills shard after shard is one step
            last += max(0, (segments[at].stop - start) // size - 1)
        row = Row(rank, last, _pieces(segments, at, start, size), same_tensors=True)
        if merge and rows and _look(rows[-1], kinds) == _look(row, kinds):
            before = rows.pop()
            same = before.same_tensors and _indices(before) == _indices(row)
            row = Row(before.first, last, before.pieces, same_tensors=same)
        rows.append(row)
        rank = last + 1
    return rows


def _pieces(segments: Sequence[Segment], at: int, start: int, size: int) -> tuple[Piece, ...]:
    """The shard [start, start + size), whose first element lies in segment ``at``."""
    pieces = []
    while at < len(segments) and segments[at].start < start + size:
        segment = segments[at]
        begin, end = max(segment.start, start), min(segment.stop, start + size)
        pieces.append(Piece(begin - start, end - start, segment.tensor, begin - segment.start))
        at += 1
    return tuple(pieces)


def _look(row: Row, kinds: Sequence[str]) -> list[tuple[int, str | None]]:
    return [
        (piece.start, None if piece.tensor is None else kinds[piece.tensor]) for piece in row.pieces
    ]


def _indices(row: Row) -> list[int | None]:
    return [piece.tensor for piece in row.pieces]


def padding_of(row: Row) -> int:
    """Elements of padding on each rank of ``row``."""
    return sum(piece.stop - piece.start for piece in row.pieces if piece.tensor is None)


def choose_rows(rows: Sequence[Row], limit: int) -> list[Row | Gap]:
    """At most ``limit`` rows, and a gap for each run that is left out. All rows if they fit.

    The first and the last rows, those with most padding (of rows with the same pattern only the
    first), and others evenly from first to last.
    """
    if len(rows) <= limit:
        return list(rows)
    quarter = limit // 4
    chosen = {*range(quarter), *range(len(rows) - quarter, len(rows))}
    padded: dict[tuple[int, ...], int] = {}  # by where the pieces start: each pattern once
    for i, row in enumerate(rows):
        if padding_of(row) and i not in chosen:
            padded.setdefault(tuple(piece.start for piece in row.pieces), i)
    chosen.update(heapq.nlargest(quarter, padded.values(), key=lambda i: (padding_of(rows[i]), -i)))
    others = [i for i in range(len(rows)) if i not in chosen]
    free = limit - len(chosen)
    chosen.update(others[(2 * k + 1) * len(others) // (2 * free)] for k in range(free))
    result: list[Row | Gap] = []
    for i, row in enumerate(rows):
        if i in chosen:
            result.append(row)
            continue
        gap = Gap(row.first, row.last, padding_of(row) * row.num_ranks)
        previous = result[-1] if result else None
        if isinstance(previous, Gap):
            result[-1] = Gap(previous.first, gap.last, previous.padding + gap.padding)
        else:
            result.append(gap)
    return result
