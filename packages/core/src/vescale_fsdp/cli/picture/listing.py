"""Ranks as labelled bars: position in the shard from left to right, one bar per rank.

::

    rank 0        | padding | a[0:4]        |    2 padding
    ranks 1-12    | b                       |    12 ranks alike
    ... ranks 13-20: 8 ranks not drawn here ...

A bar for several ranks that look the same has a shadow. Thin lines inside a tensor are borders
of its blocks, drawn where they are far enough apart to be seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from vescale_fsdp.cli.picture.kinds import kind_of
from vescale_fsdp.cli.picture.markup import (
    clean,
    count,
    element,
    number,
    percent,
    short_count,
    shorten,
)
from vescale_fsdp.cli.picture.rows import Gap, Piece, Row, padding_of
from vescale_fsdp.planner import ShardLayout

_LEFT = 132  # pixels, for the ranks
_RIGHT = 148  # for what stands behind a bar
_LETTER = 6.6  # width of a letter in a bar, on the safe side
_BLOCK = 6  # borders of blocks closer than this are not drawn
_WIDE = 4  # pieces at least this wide are set apart by a line
_THINNEST = 0.5  # narrower cannot be seen


class Listing(NamedTuple):
    """The drawn bars, and what of them the eye can see."""

    markup: str
    height: float
    visible: set[int]  # indices of the tensors that are not too thin
    has_blocks: bool  # borders of blocks are drawn


def draw_listing(
    layout: ShardLayout, rows: Sequence[Row | Gap], classes: Sequence[str], width: float
) -> Listing:
    """Draw ``rows``, in ``width`` pixels, with an axis below; ``classes`` colour the tensors."""
    scale = (width - _LEFT - _RIGHT) / layout.shard_size  # pixels per element
    bar_height = 26 if len(rows) <= 16 else 20
    marks, visible, has_blocks, y = [], set(), False, 0.0
    for row in rows:
        if isinstance(row, Gap):
            marks.append(_gap(row, y + 11, width))
            y += 18
            continue
        borders = _borders(layout, row, scale, y, bar_height)
        marks.append(_bar(layout, row, classes, scale, y, bar_height))
        marks += [borders, *_labels(layout, row, scale, y + bar_height / 2 + 4)]
        has_blocks |= bool(borders)
        visible |= {
            piece.tensor
            for piece in row.pieces
            if piece.tensor is not None and (piece.stop - piece.start) * scale >= _THINNEST
        }
        y += bar_height + (7 if row.num_ranks > 1 else 3)
    return Listing("".join(marks) + _axis(layout, scale, y), y + 36, visible, has_blocks)


def _bar(
    layout: ShardLayout, row: Row, classes: Sequence[str], scale: float, y: float, height: float
) -> str:
    """The pieces of one row, each with a title for the mouse, on a bar of the whole shard."""
    box = {"y": y, "height": height}
    bar = element("rect", class_="bar", x=_LEFT, width=layout.shard_size * scale, **box)
    pieces, cuts = "", ""
    for previous, piece in zip((None, *row.pieces), row.pieces, strict=False):
        left, right = _round(piece.start * scale), _round(piece.stop * scale)
        if piece.tensor is None:
            class_, title = "pad", f"padding: {count(piece.stop - piece.start, 'element')}"
        else:
            class_, title = classes[piece.tensor], _title(layout, row, piece)
        title = element("title", clean(f"{_ranks(row)}: {title}"))
        pieces += element("rect", title, class_=class_, x=_LEFT + left, width=right - left, **box)
        narrow = min(p.stop - p.start for p in (previous or piece, piece)) * scale < _WIDE
        if previous and not narrow:
            cuts += f"M{number(_LEFT + left)} {number(y)}v{number(height)}"
    shadow = ""
    if row.num_ranks > 1:
        edge = f"v3h{number(layout.shard_size * scale)}v-3"
        shadow = element("path", class_="twin", d=f"M{_LEFT + 3} {number(y + height + 1)}{edge}")
    drawn = bar + pieces + (element("path", class_="cut", d=cuts) if cuts else "")
    attributes = {"data_first": row.first, "data_alike": row.num_ranks}
    return shadow + element("g", drawn, **attributes)


def _title(layout: ShardLayout, row: Row, piece: Piece) -> str:
    assert piece.tensor is not None, "padding has no name"
    spec = layout.specs[piece.tensor]
    if not row.same_tensors:
        return f"one {kind_of(spec.name)} {spec.shape} each"
    if row.num_ranks > 1:
        return f"all of these ranks lie in {spec.name} {spec.shape}"
    stop = piece.skipped + piece.stop - piece.start
    return f"{spec.name} {spec.shape}, elements {piece.skipped:,} to {stop:,} of {spec.numel:,}"


def _borders(layout: ShardLayout, row: Row, scale: float, y: float, height: float) -> str:
    """A path of lines where blocks of a tensor meet."""
    if not row.same_tensors:
        return ""  # they may lie elsewhere on the next rank
    path = ""
    for piece in row.pieces:
        if piece.tensor is None:
            continue
        block = layout.specs[piece.tensor].block
        if block * scale < _BLOCK:
            continue
        until = piece.skipped + piece.stop - piece.start
        for border in range((piece.skipped // block + 1) * block, until, block):
            x = _LEFT + (piece.start + border - piece.skipped) * scale
            path += f"M{number(x)} {number(y)}v{number(height)}"
    return element("path", class_="cut block", d=path) if path else ""


def _labels(layout: ShardLayout, row: Row, scale: float, y: float) -> list[str]:
    """The ranks to the left, names inside, and padding to the right."""
    labels = [element("text", clean(_ranks(row)), class_="small end", x=_LEFT - 8, y=y)]
    for piece in row.pieces:
        room = int((piece.stop - piece.start) * scale / _LETTER) - 1
        text = _name(layout, row, piece, room)
        if text:
            x = _LEFT + (piece.start + piece.stop) / 2 * scale
            class_ = "void mid" if piece.tensor is None else "name mid"
            labels.append(element("text", clean(text), class_=class_, x=x, y=y))
    note = _note(layout, row)
    if note:
        x = _LEFT + layout.shard_size * scale + 8
        labels.append(element("text", clean(note), class_="small", x=x, y=y))
    return labels


def _note(layout: ShardLayout, row: Row) -> str:
    """How many ranks, and how much padding: ``12 alike, 2.7% padding``."""
    padding = padding_of(row)
    share = percent(padding / layout.shard_size)
    if row.num_ranks > 1:
        return f"{row.num_ranks:,} alike" + (f", {share} padding" if padding else "")
    amount = count(padding) if padding < 100_000 else short_count(padding)
    return f"{amount} padding ({share})" if padding else ""


def _name(layout: ShardLayout, row: Row, piece: Piece, room: int) -> str:
    """What to write on a piece in ``room`` letters: with the range, if it is part of a tensor."""
    if piece.tensor is None:
        return shorten("padding", room)
    spec = layout.specs[piece.tensor]
    if not row.same_tensors:
        return shorten(kind_of(spec.name), room)
    stop = piece.skipped + piece.stop - piece.start
    is_part = row.num_ranks == 1 and stop - piece.skipped < spec.numel
    full = f"{spec.name}[{piece.skipped:,}:{stop:,}]"
    return full if is_part and len(full) <= room else shorten(spec.name, room)


def _gap(gap: Gap, y: float, width: float) -> str:
    what = "rank" if gap.num_ranks == 1 else "ranks"
    text = f"{_ranks(gap)}: {gap.num_ranks:,} {what} not drawn here"
    if gap.padding:
        text += f", {short_count(gap.padding)} padding in all"
    middle = _LEFT + (width - _LEFT - _RIGHT) / 2
    return element("text", clean(text), class_="small mid", x=middle, y=y + 2)


def _axis(layout: ShardLayout, scale: float, y: float) -> str:
    """Positions in the shard, in elements, at round numbers, and S at the end."""
    size = layout.shard_size
    step = next(
        digit * 10**power
        for power in itertools.count()
        for digit in (1, 2, 5)
        if size <= 8 * digit * 10**power
    )
    path, labels = "", ""
    for position in [*range(0, size, step), size]:
        if position != size and (size - position) * scale < 110:
            continue
        x = _LEFT + position * scale
        path += f"M{number(x)} {number(y)}v4"
        text = f"S = {size:,} elements" if position == size else short_count(position)
        labels += element("text", text, class_="small mid", x=x, y=y + 17)
    path += f"M{_LEFT} {number(y)}h{number(size * scale)}"
    return element("path", class_="axis", d=path) + labels


def _ranks(row: Row | Gap) -> str:
    if row.first == row.last:
        return f"rank {row.first:,}"
    return f"ranks {row.first:,}\u2013{row.last:,}"


def _round(pixels: float) -> float:
    """To a thousandth of a pixel, so that neighbours meet and widths add up to the bar."""
    return round(pixels, 3)
