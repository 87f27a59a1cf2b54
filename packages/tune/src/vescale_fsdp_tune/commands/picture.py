"""Draws the buffers of a plan: ranks are rows, tensors are coloured, padding is black.

`svg` and `html` take the JSON of a plan. `svg` draws the groups one below the other. `html` puts
the same rows into `picture.html`, a page that loads nothing, reacts to the mouse and can enlarge a
few ranks. Tensors of a kind (``experts.*.up_proj``) have one colour in two alternating shades.
"""

from __future__ import annotations

import html as entities
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any

from vescale_fsdp.cli.text import count, several
from vescale_fsdp_tune.commands.text import percent
from vescale_fsdp_tune.costs.model import kinds

_MOST_GROUPS = 16  # limit for the groups to draw
_MOST_KINDS = 24  # limit for the lines of a legend
_WIDTH, _LEFT, _LINE = 960, 64, 18  # pixels
_FORBIDDEN = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}.head{font-weight:600;fill:#1f2328}"
    ".bg{fill:#fff}.pad{fill:#000;stroke:#000}"
    ".row{fill:none;stroke:#fff;stroke-width:2}.pad,.row{vector-effect:non-scaling-stroke}"
    "@media(prefers-color-scheme:dark){text{fill:#9da7b3}.head{fill:#f0f6fc}.bg{fill:#161b22}"
    ".row{stroke:#161b22}}"
)


def svg(plan: Mapping[str, Any]) -> str:
    """Draw the largest groups of a plan as one SVG document in ASCII.

    Its length grows with the number of tensors, not of ranks.
    """
    groups, colours, title = _prepare(plan)
    ranks = plan["settings"]["num_shards"]
    parts, y = [f'<text class="head" x="20" y="30">{_clean(title)}</text>'], 56.0
    for group in groups:
        legend, height = group["legend"], group["height"]
        facts = (
            f"{several(group['num_tensors'], 'tensor')}, {several(ranks, 'rank')} of "
            f"{several(group['shard_elements'], 'element')}, padding "
            f"{percent(group['padding_ratio'])}, order: {group['order']}"
        )
        parts.append(f'<text class="head" x="20" y="{y}">{_clean(group["title"])}</text>')
        parts.append(f'<text x="20" y="{y + _LINE}">{_clean(facts)}</text>')
        y += _LINE + 12
        steps = min(ranks, 8)
        for step in range(steps):
            rank = step * ranks // steps
            middle = y + (rank + 0.5) * height / ranks + 4
            parts.append(f'<text x="20" y="{middle:.1f}">{rank:,}</text>')
        parts.append(
            f'<svg x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - 20}" height="{height}" '
            f'viewBox="0 0 1000 {ranks}" preserveAspectRatio="none">{group["rows"]}</svg>'
        )
        y += height + 12
        for index, (class_, text) in enumerate(legend):
            place = f"translate({20 + index % 2 * 470} {y + index // 2 * _LINE})"
            parts.append(
                f'<g transform="{place}"><rect class="{class_}" width="20" height="11"/>'
                f'<text x="28" y="10">{_clean(text)}</text></g>'
            )
        y += math.ceil(len(legend) / 2) * _LINE + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" '
        f'height="{y}" role="img"><title>{_clean(title)}</title><style>{_STYLE}{colours}</style>'
        f'<rect class="bg" width="{_WIDTH}" height="{y}"/>{"".join(parts)}</svg>\n'
    )


def html(plan: Mapping[str, Any]) -> str:
    """Return an HTML page in ASCII: the figures of a plan, and the rows of its largest groups."""
    groups, colours, title = _prepare(plan)
    data = json.dumps({**plan, "title": title, "groups": groups})
    page = files(__package__).joinpath("picture.html").read_text(encoding="utf-8")
    for place, text in (
        ("/*style*/", _STYLE + colours),
        ("<!--title-->", _clean(title)),
        ("/*plan*/", data.replace("<", "\\u003c")),  # no name can end the script
    ):
        page = page.replace(place, text)
    return page


def _prepare(plan: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str, str]:
    """Return the groups to draw with their rows, the CSS of the colours, and the title."""
    ranks, shown = plan["settings"]["num_shards"], list(plan["groups"])
    title = f"{plan['model']['name']} on {several(ranks, 'rank')}"
    if len(shown) > _MOST_GROUPS:
        title += f", the {_MOST_GROUPS} largest of {len(shown):,} groups"
        shown = sorted(shown, key=lambda each: -each["count"] * each["num_elements"])
        del shown[_MOST_GROUPS:]
    sizes: dict[str, int] = {}  # elements, by kind
    for group in shown:
        for kind, tensor in zip(_kinds(group), group["tensors"], strict=True):
            sizes[kind] = sizes.get(kind, 0) + math.prod(tensor["shape"])
    order = {kind: i for i, kind in enumerate(sorted(sizes, key=lambda kind: -sizes[kind]))}
    hues = [round(210 + i * 137.5) % 360 for i in range(len(order))]  # neighbours far apart
    style = "".join(
        f".c{i}{{fill:hsl({hue},{65 - i % 3 * 15}%,70%)}}.d{i}{{fill:hsl({hue},45%,58%)}}"
        for i, hue in enumerate(hues)
    )
    return [_prepared(group, ranks, order) for group in shown], style, title


def _prepared(group: Mapping[str, Any], ranks: int, order: Mapping[str, int]) -> dict[str, Any]:
    times = f", {group['count']:,} times" if group["count"] > 1 else ""
    return {
        **group,
        "title": f"{group['name']}{times}",
        "height": min(max(24 * ranks, 48), 480),
        "rows": _rows(group, ranks, order),
        "legend": _legend(group, order),
    }


def _legend(group: Mapping[str, Any], order: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return CSS class and text of each line: padding, then kinds, the largest first."""
    found: dict[str, list[int]] = {}
    for kind, tensor in zip(_kinds(group), group["tensors"], strict=True):
        found.setdefault(kind, []).append(math.prod(tensor["shape"]))
    lines = [("pad", f"padding: {count(group['padding_elements'])}")]
    for kind in sorted(found, key=lambda kind: order[kind]):
        in_tensors = f" in {len(found[kind]):,} tensors" if len(found[kind]) > 1 else ""
        lines.append((f"c{order[kind]}", f"{kind}: {count(sum(found[kind]))}{in_tensors}"))
    if len(lines) > _MOST_KINDS:
        lines[_MOST_KINDS - 1 :] = [("none", f"and {len(lines) - _MOST_KINDS + 1:,} smaller kinds")]
    return lines


def _rows(group: Mapping[str, Any], ranks: int, order: Mapping[str, int]) -> str:
    """Return a path for each tensor and each run of padding. A row is 1 high and 1,000 wide."""
    size, position, parts, seen = group["shard_elements"], 0, [], dict.fromkeys(order, 0)
    named = [
        (tensor["offset_elements"], math.prod(tensor["shape"]), kind, tensor)
        for kind, tensor in zip(_kinds(group), group["tensors"], strict=True)
    ]
    for start, numel, kind, tensor in sorted(named, key=lambda each: each[:2]):
        if numel:
            parts.append(_path("pad", position, start, size, "padding"))
            position = start + numel
            shade = "cd"[seen[kind] % 2]
            seen[kind] += 1
            title = f"{tensor['name']} {tuple(tensor['shape'])}"
            parts.append(_path(f"{shade}{order[kind]}", start, position, size, title))
    parts.append(_path("pad", position, size * ranks, size, "padding"))
    borders = "".join(f"M0 {rank}H1000" for rank in range(1, ranks)) if ranks <= 32 else ""
    return f'{"".join(parts)}<path class="row" d="{borders}"/>'


def _path(class_: str, start: int, stop: int, size: int, title: str) -> str:
    """Return the path of [start, stop) of the buffer: end of a row, whole rows, start of a row."""
    if start == stop:
        return ""
    (first, begin), (last, end) = divmod(start, size), divmod(stop, size)
    edges = [(first, begin)]
    if begin and first < last:
        edges.append((first + 1, 0))
    if last > edges[-1][0]:
        edges.append((last, 0))
    edges.append((last, end))
    drawn = ""
    for (row, x), (below, end_x) in pairwise(edges):
        if (row, x) != (below, end_x):
            right, bottom = (1000 * end_x / size, row + 1) if below == row else (1000, below)
            drawn += f"M{1000 * x / size:.6g} {row}H{right:.6g}V{bottom}H{1000 * x / size:.6g}Z"
    where = several(stop - start, "element")
    until = (stop - 1) // size
    ranks = f"rank {first:,}" if first == until else f"ranks {first:,} to {until:,}"
    words = _clean(f"{title}: {where}, {ranks}")
    return f'<path class="{class_}" d="{drawn}"><title>{words}</title></path>'


def _kinds(group: Mapping[str, Any]) -> Sequence[str]:
    return kinds(tensor["name"] for tensor in group["tensors"])


def _clean(text: str) -> str:
    """Escape ``text`` for XML and HTML, in ASCII."""
    allowed = entities.escape(_FORBIDDEN.sub("\ufffd", text))
    return allowed.encode("ascii", "xmlcharrefreplace").decode("ascii")
