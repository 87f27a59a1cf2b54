"""A picture of planned buffers: ranks as rows, tensors coloured, padding dark on a light page.

>>> from vescale_fsdp.cli.picture import PictureGroup, svg
>>> from vescale_fsdp.planner import TensorSpec, plan
>>> layout = plan([TensorSpec("a", (2, 4), block=4), TensorSpec("b", (3,), block=1)], 2)
>>> text = svg([PictureGroup("two tensors", layout)], title="an example")

``svg`` gives one drawing, ``html`` a page in which the mouse shows tensor, rank and range. Both
need nothing else to be read, in light and dark mode, and neither needs torch.

A group of any size stays readable, and small as a file. Up to 32 ranks, each has a bar. Above,
ranks that look alike share one, and an overview shows all of them as thin lines. If that is more
than 36 bars, the others are left out, with a line in their place that says so.

Files: ``rows`` (what there is to show, in integers), ``kinds`` (colours), ``overview`` (all
ranks), ``listing`` (bars), ``drawing`` (a group), ``page`` (HTML), ``markup`` (escaping).
"""

from __future__ import annotations

from collections.abc import Sequence

from vescale_fsdp.cli.picture.drawing import WIDTH, draw_group
from vescale_fsdp.cli.picture.kinds import colours_of, style
from vescale_fsdp.cli.picture.markup import clean, element
from vescale_fsdp.cli.picture.page import html
from vescale_fsdp.cli.picture.rows import PictureGroup

__all__ = ["PictureGroup", "html", "svg"]

_MARGIN = 20  # pixels


def svg(groups: Sequence[PictureGroup], *, title: str) -> str:
    """The buffers of ``groups``, one below the other, as one SVG document in ASCII.

    A title for the mouse on each part names tensor, shape and ranks. The text depends on the
    arguments only. Cost: O(tensors) time and size; about 120 bytes per tensor.
    """
    colours = colours_of(group.layout.specs for group in groups)
    parts = [element("text", clean(title), class_="head", x=_MARGIN, y=_MARGIN + 14)]
    y = float(_MARGIN + 34)
    for group in groups:
        drawing = draw_group(group, colours)
        parts.append(element("g", drawing.markup, transform=f"translate({_MARGIN} {y:g})"))
        y += drawing.height + _MARGIN
    width = WIDTH + 2 * _MARGIN
    background = element("rect", class_="bg", width=width, height=y)
    head = element("title", clean(title)) + element("style", style(colours.values()))
    return element(
        "svg",
        head + background + "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {y:g}",
        width=width,
        height=y,
        role="img",
    )
