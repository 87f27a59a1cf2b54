"""The pictures as a page: facts above, a list of all tensors below, and answers to the mouse.

The list of tensors is also what the script reads: it turns the position of the mouse on a bar
into a rank and an element, and looks up whose it is. Without scripts the page shows the same,
with the titles of the SVG for the mouse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vescale_fsdp.cli.picture.drawing import WIDTH, draw_group
from vescale_fsdp.cli.picture.kinds import colours_of, style
from vescale_fsdp.cli.picture.markup import clean, element
from vescale_fsdp.cli.picture.rows import PictureGroup
from vescale_fsdp.planner import ShardLayout

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #57606a; --strong: #1f2328;
  --page: #ffffff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --line: #30363d; --soft: #9da7b3;
  --strong: #f0f6fc; --page: #0d1117; --card: #161b22; } }
body { margin: 24px auto; max-width: 960px; padding: 0 20px; background: var(--page);
  color: var(--strong); font: 14px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 22px; margin: 0 0 16px; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 8px;
  margin: 0 0 24px; }
dl div { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: 8px 12px; }
dt { color: var(--soft); font-size: 12px; }
dd { margin: 0; font-size: 16px; font-weight: 600; overflow-wrap: anywhere; }
section { border-top: 1px solid var(--line); padding: 16px 0; }
svg { display: block; max-width: 100%; height: auto; }
summary { color: var(--soft); cursor: pointer; margin-top: 8px; }
table { border-collapse: collapse; margin-top: 8px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 3px 14px 3px 0; text-align: right; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: normal; }
#tip { position: fixed; pointer-events: none; background: var(--strong); color: var(--page);
  border-radius: 6px; padding: 6px 10px; font-size: 12px; max-width: 420px; z-index: 1;
  overflow-wrap: anywhere; white-space: pre-line; }
"""

# Plain ASCII, and no "</" in it.
_SCRIPT = """
const tip = document.getElementById("tip");
const show = n => n.toLocaleString("en-US");
for (const section of document.querySelectorAll("section")) {
  const size = +section.dataset.shard;
  const tensors = [...section.querySelectorAll("tr[data-start]")]
    .map(row => ({ start: +row.dataset.start, count: +row.dataset.count, row }))
    .filter(tensor => tensor.count > 0)
    .sort((a, b) => a.start - b.start);
  section.querySelectorAll("g[data-first] title").forEach(title => title.remove());
  const lastUpTo = position => {
    let low = -1, high = tensors.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (tensors[middle].start <= position) low = middle; else high = middle;
    }
    return low;
  };
  const text = (rank, who, position) => {
    const at = lastUpTo(position), tensor = tensors[at];
    const from = rank * size, to = from + size;
    const end = tensor ? tensor.start + tensor.count : 0;
    if (!tensor || position >= end) {
      const next = at + 1 < tensors.length ? tensors[at + 1].start : Infinity;
      const here = Math.min(next, to) - Math.max(end, from);
      return `padding: ${show(here)} elements\\n${who}`;
    }
    const cells = [...tensor.row.cells].map(cell => cell.textContent);
    const first = Math.max(from - tensor.start, 0);
    const last = Math.min(to - tensor.start, tensor.count);
    return `${cells[0]}\\nshape ${cells[1]}, block ${cells[2]}\\n` +
      `${who}: elements ${show(first)} to ${show(last)} of ${show(tensor.count)}`;
  };
  section.addEventListener("pointermove", event => {
    const bar = event.target.closest("g[data-first]");
    tip.hidden = !bar;
    if (!bar) return;
    const box = bar.firstElementChild.getBoundingClientRect();
    const across = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1 - 1e-9);
    const down = Math.min(Math.max((event.clientY - box.top) / box.height, 0), 1 - 1e-9);
    const alike = +(bar.dataset.alike || 1);
    const first = +bar.dataset.first;
    const rank = first + Math.floor(down * (bar.dataset.ranks || 1));
    let who = `rank ${show(rank)}`;
    if (alike > 1) who = `ranks ${show(first)} to ${show(first + alike - 1)} alike, ${who}`;
    tip.textContent = text(rank, who, rank * size + Math.floor(across * size));
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    const below = event.clientY + 18, above = event.clientY - tip.offsetHeight - 10;
    tip.style.top = (below + tip.offsetHeight > innerHeight ? above : below) + "px";
  });
  section.addEventListener("pointerleave", () => { tip.hidden = true; });
}
"""


def html(
    groups: Sequence[PictureGroup], *, title: str, facts: Sequence[tuple[str, str]] = ()
) -> str:
    """One page with ``facts`` (label, value) and the buffers of ``groups``, in ASCII.

    Self-contained: it loads nothing. The text depends on the arguments only. Cost: O(tensors).
    """
    colours = colours_of(group.layout.specs for group in groups)
    cards = "".join(
        element("div", f"<dt>{clean(label)}</dt><dd>{clean(value)}</dd>") for label, value in facts
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{clean(title)}</title><style>{_STYLE}{style(colours.values())}</style>"
    )
    body = f"<h1>{clean(title)}</h1>" + (element("dl", cards) if cards else "")
    body += "".join(_section(group, colours) for group in groups)
    body += f'<div id="tip" role="status" hidden></div><script>{_SCRIPT}</script>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _section(group: PictureGroup, colours: Mapping[str, int]) -> str:
    """One group: its drawing, and its tensors as a table."""
    drawing = draw_group(group, colours)
    picture = element(
        "svg",
        drawing.markup,
        viewBox=f"0 0 {WIDTH} {drawing.height:g}",
        width=WIDTH,
        height=drawing.height,
        role="img",
        aria_label=group.title,
    )
    layout = group.layout
    rows = [_table_row(layout, index) for index in range(len(layout.specs))]
    header = "<tr><th>tensor</th><th>shape</th><th>block</th><th>elements</th><th>ranks</th></tr>"
    table = f"<table>{header}{''.join(rows)}</table>"
    details = f"<details><summary>All {len(rows):,} tensors</summary>{table}</details>"
    return f'<section data-shard="{layout.shard_size}">{picture}{details}</section>'


def _table_row(layout: ShardLayout, index: int) -> str:
    """What the page says of a tensor; start and count are for the script, in elements."""
    spec, start, size = layout.specs[index], layout.offsets[index], layout.shard_size
    first, last = (start // size, (start + spec.numel - 1) // size) if spec.numel else (0, -1)
    ranks = (
        "none" if last < first else f"{first:,}" if last == first else f"{first:,}\u2013{last:,}"
    )
    block = min(spec.block, max(spec.numel, 1))
    cells = [spec.name, str(spec.shape), f"{block:,}", f"{spec.numel:,}", ranks]
    line = "".join(f"<td>{clean(cell)}</td>" for cell in cells)
    return f'<tr data-start="{start}" data-count="{spec.numel}">{line}</tr>'
