"""One group as SVG: a heading, the legend, all ranks at a glance, and ranks as labelled bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vescale_fsdp.cli.picture.kinds import Kind, kind_of, kinds_of
from vescale_fsdp.cli.picture.listing import draw_listing
from vescale_fsdp.cli.picture.markup import clean, count, element, percent, short_count
from vescale_fsdp.cli.picture.overview import draw_overview
from vescale_fsdp.cli.picture.rows import (
    Gap,
    PictureGroup,
    Row,
    Segment,
    choose_rows,
    rows_of,
    segments_of,
)
from vescale_fsdp.planner import ShardLayout

WIDTH = 960  # pixels
_FEW_RANKS = 32  # up to here every rank has a bar of its own
_MOST_ROWS = 36  # bars at most; above, some ranks are only in the overview
_MOST_KINDS = 60  # lines of the legend
_LINE = 18  # height of a line of text


class Drawing(NamedTuple):
    """Markup that starts at the top left corner, ``WIDTH`` wide."""

    markup: str
    height: float


def draw_group(group: PictureGroup, colours: Mapping[str, int]) -> Drawing:
    """Draw one buffer. O(tensors + rows), however many ranks; at most 36 rows are drawn."""
    layout = group.layout
    kinds = [kind_of(spec.name) for spec in layout.specs]
    segments = segments_of(layout)
    rows = rows_of(layout, segments, kinds, merge=layout.num_shards > _FEW_RANKS)
    chosen = choose_rows(rows, _MOST_ROWS)
    classes = _classes(segments, kinds, colours)
    parts: list[Drawing] = []
    visible: set[int] = set()
    if layout.num_shards > _FEW_RANKS and layout.shard_size:
        part, seen = _overview(layout, segments, classes, complete=len(chosen) == len(rows))
        parts.append(part)
        visible |= seen
    if layout.shard_size:
        part, seen = _listing(layout, chosen, classes)
        parts.append(part)
        visible |= seen
    legend = _legend(layout, colours, visible)
    return _stack([_heading(group), legend, *parts])


def _stack(parts: Sequence[Drawing]) -> Drawing:
    """Parts one below the other."""
    markup, y = "", 0.0
    for part in parts:
        markup += element("g", part.markup, transform=f"translate(0 {y:g})")
        y += part.height
    return Drawing(markup, y)


def _classes(
    segments: Sequence[Segment], kinds: Sequence[str], colours: Mapping[str, int]
) -> list[str]:
    """The colour class of each tensor: a kind's two shades in turn, in the buffer's order."""
    classes = [""] * len(kinds)
    seen: dict[str, int] = {}
    for segment in segments:
        if segment.tensor is not None:
            kind = kinds[segment.tensor]
            turn = seen[kind] = seen.get(kind, -1) + 1
            classes[segment.tensor] = f"{'cd'[turn % 2]}{colours[kind]}"
    return classes


def _heading(group: PictureGroup) -> Drawing:
    layout = group.layout
    padding = f"padding {count(layout.padding, 'element')}, {percent(layout.padding_ratio)}"
    facts = [
        count(len(layout.specs), "tensor"),
        count(layout.num_shards, "rank"),
        f"S = {count(layout.shard_size, 'element')} per rank",
        f"{padding} of the tensors' size",
        f"order: {layout.order_name}",
    ]
    title = group.title if len(group.title) <= 110 else group.title[:109] + "\u2026"
    markup = element("text", clean(title), class_="head", x=0, y=16)
    markup += element("text", clean(" \u00b7 ".join(facts)), x=0, y=36)
    return Drawing(markup, 46)


def _legend(layout: ShardLayout, colours: Mapping[str, int], visible: set[int]) -> Drawing:
    """The kinds with their colours and sizes, in two columns, padding first.

    A kind whose tensors are too thin to see, here or there, says so.
    """
    kinds = kinds_of(layout.specs)
    text = f"padding: {count(layout.padding, 'element')}"
    entries = [_swatch("pad", "pad") + _entry(f"{text}, {percent(layout.padding_ratio)}", "")]
    for kind in kinds[:_MOST_KINDS]:
        colour = colours[kind.name]
        name = kind.name if len(kind.name) <= 46 else "\u2026" + kind.name[-45:]
        entries.append(
            _swatch(f"c{colour}", f"d{colour}" if len(kind.indices) > 1 else f"c{colour}")
            + _entry(f"{name}: {_size(kind)}{_unseen(kind, visible)}", kind.name)
        )
    if kinds[_MOST_KINDS:]:
        rest = kinds[_MOST_KINDS:]
        elements = sum(kind.num_elements for kind in rest)
        more = f"and {count(len(rest), 'smaller kind')}: {short_count(elements)} elements"
        entries.append(_entry(more, ", ".join(kind.name for kind in rest)))
    per_column = -(-len(entries) // 2)
    markup = "".join(
        element(
            "g", entry, transform=f"translate({i // per_column * 490} {i % per_column * _LINE})"
        )
        for i, entry in enumerate(entries)
    )
    return Drawing(markup, per_column * _LINE + 12)


def _swatch(left: str, right: str) -> str:
    box = element("rect", class_=left, x=0, y=2, width=22, height=11)
    return box + (
        element("rect", class_=right, x=11, y=2, width=11, height=11) if right != left else ""
    )


def _entry(text: str, title: str) -> str:
    content = clean(text) + (element("title", clean(title)) if title else "")
    return element("text", content, class_="small", x=28, y=12)


def _size(kind: Kind) -> str:
    size = f"{short_count(kind.num_elements)} elements" if kind.num_elements != 1 else "1 element"
    return size if len(kind.indices) == 1 else f"{size} in {len(kind.indices):,} tensors"


def _unseen(kind: Kind, visible: set[int]) -> str:
    """What the picture does not show of a kind."""
    if not kind.num_elements:
        return ""
    unseen = sum(index not in visible for index in kind.indices)
    if not unseen:
        return ""
    return ", too thin to see" if unseen == len(kind.indices) else f", {unseen} too thin to see"


def _overview(
    layout: ShardLayout, segments: Sequence[Segment], classes: Sequence[str], *, complete: bool
) -> tuple[Drawing, set[int]]:
    """All ranks; small if each of them, or its like, also has a bar of its own (``complete``)."""
    overview = draw_overview(layout, segments, classes, WIDTH, 192 if complete else 768)
    text = f"All {layout.num_shards:,} ranks: a line each, from 0 to S, downward"
    text += " and on in the next column." if overview.num_columns > 1 else "."
    if overview.most_padding:
        share = percent(overview.most_padding)
        text += f" Bars to the right: their padding, the longest {share} of a shard."
    markup = element("text", clean(text), x=0, y=14)
    markup += element("g", overview.markup, transform="translate(0 24)")
    return Drawing(markup, overview.height + 48), overview.visible


def _listing(
    layout: ShardLayout, rows: Sequence[Row | Gap], classes: Sequence[str]
) -> tuple[Drawing, set[int]]:
    """The chosen rows, and a line that says which ranks they are."""
    listing = draw_listing(layout, rows, classes, WIDTH)
    left_out = sum(row.num_ranks for row in rows if isinstance(row, Gap))
    if left_out:
        text = (
            f"A closer look at {layout.num_shards - left_out:,} of the {layout.num_shards:,} "
            f"ranks: the first, the last, those with most padding, and some between."
        )
    elif len(rows) < layout.num_shards:
        text = f"All {layout.num_shards:,} ranks again: those that look alike share a bar."
    else:
        text = "A bar for each rank's shard."
    if listing.has_blocks:
        text += " Thin lines: blocks, which are never cut."
    markup = element("text", clean(text), x=0, y=14)
    markup += element("g", listing.markup, transform="translate(0 24)")
    return Drawing(markup, listing.height + 30), listing.visible
