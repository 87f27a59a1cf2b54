"""All ranks at a glance: every rank is a line, however thin, and every tensor is drawn.

A tensor in a buffer that is cut every S elements is at most three rectangles: the end of its
first rank's line, whole lines, the start of its last rank's line. So the cost is
O(tensors), whatever the number of ranks. The lines go down, then on in the next column::

    rank 0 | . . a a a a |    rank 2 | b . c c c c |
    rank 1 | a a a a b b |    rank 3 | c c c c c c |

Padding is often too thin to see at this scale: the dark bars to the right of a column show how
much of it the ranks beside them hold, the longest one where there is most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from vescale_fsdp.cli.picture.markup import clean, count, element, number
from vescale_fsdp.cli.picture.rows import Segment
from vescale_fsdp.planner import ShardLayout

_LABEL = 46  # pixels, left of a column
_GUTTER = 26  # right of it
_THINNEST = 0.5  # what is less wide or high, in pixels, cannot be seen


class Overview(NamedTuple):
    """The drawn picture, and what of it the eye can see."""

    markup: str
    height: float
    num_columns: int
    visible: set[int]  # indices of the tensors that are not too thin
    most_padding: float  # share of a rank's shard, where the bar in the margin is longest


class _Grid(NamedTuple):
    """Where rank r's line lies: column r // ranks_per_column, and so on. In pixels."""

    num_shards: int
    shard_size: int
    num_columns: int
    ranks_per_column: int
    line: float  # height of a rank's line
    width: float  # of a column's lines

    def left(self, column: int) -> float:
        """Where the lines of a column start."""
        return column * (self.width + _LABEL + _GUTTER) + _LABEL

    def ranks(self, column: int) -> tuple[int, int]:
        """The first rank of a column, and the first of the next."""
        first = column * self.ranks_per_column
        return first, min(first + self.ranks_per_column, self.num_shards)


def draw_overview(
    layout: ShardLayout,
    segments: Sequence[Segment],
    classes: Sequence[str],
    width: float,
    height: float,
) -> Overview:
    """Draw all ranks in ``width`` and about ``height`` pixels; ``classes`` colour the tensors."""
    grid = _grid_for(layout, width, height)
    visible: set[int] = set()
    shapes: list[list[str]] = [[] for _ in range(grid.num_columns)]
    for segment in segments:
        seen = False
        for column, path, can_see in _outline(grid, segment):
            shapes[column].append(_shape(layout, segment, classes, path))
            seen |= can_see
        if seen and segment.tensor is not None:
            visible.add(segment.tensor)
    bars, most = _padding_bars(grid, segments)
    columns = [_column(grid, column, shapes[column]) for column in range(grid.num_columns)]
    markup, tall = "".join(columns) + bars, grid.line * grid.ranks_per_column
    return Overview(markup, tall, grid.num_columns, visible, most)


def _grid_for(layout: ShardLayout, width: float, height: float) -> _Grid:
    ranks = layout.num_shards
    num_columns = 1 if ranks <= 96 else 2 if ranks <= 256 else 4
    per_column = math.ceil(ranks / num_columns)
    line = min(6.0, height / per_column)
    if line > 1:
        line = float(math.floor(line))  # whole pixels stay crisp
    column_width = width / num_columns - _LABEL - _GUTTER
    return _Grid(ranks, layout.shard_size, num_columns, per_column, line, column_width)


def _outline(grid: _Grid, segment: Segment) -> list[tuple[int, str, bool]]:
    """Column, path, and whether it can be seen, of a segment's part in each column it is in."""
    size, parts = grid.shard_size, []
    column_size = grid.ranks_per_column * size
    for column in range(segment.start // column_size, (segment.stop - 1) // column_size + 1):
        first, end = grid.ranks(column)
        start = max(segment.start, first * size) - first * size
        stop = min(segment.stop, end * size) - first * size
        boxes = _boxes(start, stop, size)
        can_see, path = False, ""
        for line, lines, begin, until in boxes:
            left = grid.left(column) + grid.width * begin / size
            right = grid.left(column) + grid.width * until / size
            top, bottom = grid.line * line, grid.line * (line + lines)
            path += f"M{number(left)} {number(top)}H{number(right)}V{number(bottom)}"
            path += f"H{number(left)}Z"
            can_see |= right - left >= _THINNEST and bottom - top >= _THINNEST
        parts.append((column, path, can_see))
    return parts


def _boxes(start: int, stop: int, size: int) -> list[tuple[int, int, int, int]]:
    """[start, stop) in lines of ``size``: first line, number of lines, and the range in each."""
    first, last = start // size, (stop - 1) // size
    begin, until = start - first * size, stop - last * size
    if first == last:
        return [(first, 1, begin, until)]
    boxes = []
    if begin:
        boxes.append((first, 1, begin, size))
        first += 1
    whole = last - first + (until == size)
    if whole:
        boxes.append((first, whole, 0, size))
    if until < size:
        boxes.append((last, 1, 0, until))
    return boxes


def _shape(layout: ShardLayout, segment: Segment, classes: Sequence[str], path: str) -> str:
    first, last = segment.start // layout.shard_size, (segment.stop - 1) // layout.shard_size
    where = f"rank {first:,}" if first == last else f"ranks {first:,}\u2013{last:,}"
    if segment.tensor is None:
        title, class_ = f"padding: {count(segment.stop - segment.start, 'element')}, {where}", "pad"
    else:
        spec, class_ = layout.specs[segment.tensor], classes[segment.tensor]
        title = f"{spec.name} {spec.shape}, {where}"
    return element("path", element("title", clean(title)), class_=class_, d=path)


def _column(grid: _Grid, column: int, shapes: list[str]) -> str:
    """A column's lines, and the ranks' numbers to the left of them."""
    first, end = grid.ranks(column)
    height = grid.line * (end - first)
    bar = element(
        "rect", class_="bar", x=grid.left(column), y=0, width=grid.width, height=float(height)
    )
    step = _label_step(grid.line)
    labels = []
    numbered = [first, *range(first - first % step + step, end, step)]
    if len(numbered) > 1 and (numbered[1] - first) * grid.line < 16:
        del numbered[1]  # it would touch the number of the first rank
    for rank in numbered:
        y = grid.line * (rank - first) + min(grid.line, 6) / 2
        labels.append(_label(grid.left(column) - 6, y, rank))
        labels.append(
            element("path", class_="axis", d=f"M{number(grid.left(column) - 4)} {number(y)}h4")
        )
    drawn = bar + "".join(shapes)
    lines = element(
        "g", drawn, data_first=first, data_ranks=end - first, shape_rendering="crispEdges"
    )
    return lines + "".join(labels)


def _label(x: float, y: float, rank: int) -> str:
    return element("text", f"{rank:,}", class_="small end", x=x, y=y + 4)


def _label_step(line: float) -> int:
    """Ranks from one number to the next: a round number of them, at least 32 pixels apart."""
    step = 1
    while step * line < 32:
        step *= 2
    return step


def _padding_bars(grid: _Grid, segments: Sequence[Segment]) -> tuple[str, float]:
    """Bars right of the columns, and the share of padding that the longest one stands for.

    A bar stands for the ranks of at least two pixels of height.
    """
    group = max(1, math.ceil(2 / grid.line))
    per_column = math.ceil(grid.ranks_per_column / group)
    padding = [0] * (per_column * grid.num_columns)
    for segment in segments:
        if segment.tensor is None:
            _spread(padding, grid, segment, group, per_column)
    bars = []  # column, first and last line, share
    for place, elements in enumerate(padding):
        column, bar = divmod(place, per_column)
        first, end = grid.ranks(column)
        top, bottom = bar * group, min((bar + 1) * group, end - first)
        if elements:
            bars.append((column, top, bottom, elements / ((bottom - top) * grid.shard_size)))
    most = max((share for *_, share in bars), default=0.0)
    path = ""
    for column, top, bottom, share in bars:
        left = grid.left(column) + grid.width + 3
        right = left + max(1.0, (_GUTTER - 8) * share / most)
        path += f"M{number(left)} {number(top * grid.line)}H{number(right)}"
        path += f"V{number(bottom * grid.line)}H{number(left)}Z"
    return element("path", class_="pad", d=path) if path else "", most


def _spread(padding: list[int], grid: _Grid, segment: Segment, group: int, per_column: int) -> None:
    """Add a segment of padding to the bars of the ranks that hold it."""
    position = segment.start
    while position < segment.stop:
        rank = position // grid.shard_size
        column, line = divmod(rank, grid.ranks_per_column)
        bar = line // group
        end = min((bar + 1) * group, grid.ranks_per_column) + column * grid.ranks_per_column
        until = min(segment.stop, end * grid.shard_size)
        padding[column * per_column + bar] += until - position
        position = until
