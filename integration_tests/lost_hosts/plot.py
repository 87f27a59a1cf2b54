"""Draws a training with faults as SVG: the loss, the ranks alive and the time lost, over time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]  # seconds since the start, value

WIDTH, LEFT, RIGHT, TOP, HEIGHT, BETWEEN = 960, 70, 20, 130, 150, 40
_STYLE = """<style>
svg { background: white; font: 13px sans-serif }
text { fill: #333 } .title { font-weight: bold } .small { font-size: 11px }
.axis { stroke: #999; fill: none } .grid { stroke: #eee }
.line { fill: none; stroke-width: 2 } .fault { stroke: #c0392b; stroke-dasharray: 4 3 }
.label { fill: #c0392b; font-size: 11px }
</style>"""


class Panel:
    """One curve over time.

    Args:
        title: with the unit.
        points: ascending in time.
        color: of the line.
        is_stepped: the value holds until the next point.
        from_zero: the axis begins at 0.
    """

    def __init__(
        self, title: str, points: Points, color: str, *, is_stepped: bool, from_zero: bool
    ) -> None:
        self._title, self._points, self._color = title, points, color
        self._is_stepped = is_stepped
        values = [value for _, value in points] or [0.0]
        self._low = 0.0 if from_zero else min(values)
        self._high = max(max(values), self._low + 1e-9)
        if from_zero:
            self._high = max(self._high * 1.1, 1.0)

    def draw(self, top: float, end: float) -> list[str]:
        """The elements, from ``top`` on, for the time from 0 to ``end``."""
        bottom = top + HEIGHT

        def place(at: float, value: float) -> str:
            share = (value - self._low) / (self._high - self._low)
            return f"{x_of(at, end):.1f},{bottom - share * HEIGHT:.1f}"

        made = [f'<text class="title" x="{LEFT}" y="{top - 8}">{escape(self._title)}</text>']
        for share in (0.0, 0.5, 1.0):
            y, value = bottom - share * HEIGHT, self._low + share * (self._high - self._low)
            made.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            made.append(
                f'<text class="small" text-anchor="end" x="{LEFT - 8}" y="{y + 4}">'
                f"{value:.3g}</text>"
            )
        made.append(f'<path class="axis" d="M{LEFT},{top} V{bottom} H{WIDTH - RIGHT}"/>')
        path: list[str] = []
        before: float | None = None
        for at, value in self._points:
            if self._is_stepped and before is not None:
                path.append(place(at, before))
            path.append(place(at, value))
            before = value
        if self._is_stepped and before is not None:
            path.append(place(end, before))
        points = " ".join(path)
        made.append(f'<polyline class="line" stroke="{self._color}" points="{points}"/>')
        return made


def x_of(at: float, end: float) -> float:
    """The place of a time."""
    return LEFT + (WIDTH - LEFT - RIGHT) * at / max(end, 1e-9)


def draw(
    path: Path, title: str, panels: Sequence[Panel], faults: Sequence[tuple[float, str]], end: float
) -> None:
    """Write the picture.

    Args:
        path: of the file.
        panels: from the top down, over the same time.
        faults: when each has happened, and what it was.
        end: of the time, in seconds.
    """
    height = TOP + len(panels) * (HEIGHT + BETWEEN) + 20
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">',
        _STYLE,
        f'<text class="title" font-size="16" x="{LEFT}" y="24">{escape(title)}</text>',
    ]
    bottom = TOP + len(panels) * (HEIGHT + BETWEEN) - BETWEEN
    for number, (at, text) in enumerate(faults):
        x, y = x_of(at, end), 44 + 14 * (number % 5)
        is_right = x > WIDTH * 0.6
        anchor = f'text-anchor="{"end" if is_right else "start"}"'
        made.append(f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{bottom}"/>')
        made.append(
            f'<text class="label" {anchor} x="{x + (-4 if is_right else 4):.1f}" y="{y + 4}">'
            f"{escape(text)}</text>"
        )
    for number, panel in enumerate(panels):
        made += panel.draw(TOP + number * (HEIGHT + BETWEEN), end)
    spacing = next(each for each in (5, 10, 20, 30, 60, 120, 600) if end / each <= 12)
    for number in range(int(end / spacing) + 1):
        x = x_of(number * spacing, end)
        made.append(
            f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{bottom + 16}">'
            f"{number * spacing} s</text>"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*made, "</svg>", ""]))
