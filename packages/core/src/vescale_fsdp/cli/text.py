"""Formats output: amounts with three digits and a unit, tables, progress bars, errors of input."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PATIENCE_S = 1.0

T = TypeVar("T")


class InputError(Exception):
    """Bad input. ``main`` prints the message as one line on stderr and returns exit code 2."""


def count(number: float) -> str:
    """Format a number of elements: "3.23 bn" for 3_232_931_520. Not "B", which means bytes here."""
    return _scaled(number, 1000, ("", "K", "M", "bn", "tn"))


def several(number: int, noun: str) -> str:
    """Format a number with a noun: ``1 unit``, ``37 units``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def plain(text: str) -> str:
    """Escape control characters and line breaks in ``text``, as in ``\\x1b``."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def bits_per_s(bytes_per_s: float) -> str:
    """Format bytes per second as bits: "400 Gbit/s" for 50e9."""
    return _scaled(8 * bytes_per_s, 1000, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def binary(num_bytes: float) -> str:
    """Format bytes in powers of 1,024: "2.00 GiB" for 2**31."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def duration(seconds: float) -> str:
    """Format seconds; short ones as milliseconds or microseconds."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 0.9995:
            return f"{_digits(seconds * scale)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def percent(ratio: float) -> str:
    """Format a ratio: "5.74%" for 0.0574; from 1,000% on as a multiple, "77.1x" for 77.1."""
    return f"{_digits(ratio)}x" if ratio >= 10 else f"{_digits(100 * ratio)}%"


def difference(value: float, base: float) -> str:
    """Format how much ``value`` is above (+) or below (-) ``base``, in percent.

    From ten times ``base`` on it is a multiple: "78.5x" for 785 and 10.
    """
    if not base:
        return ""
    if value >= 10 * base:
        return f"{_digits(value / base)}x"
    text = f"{100 * (value / base - 1):+,.1f}%"
    return "0.0%" if text[1:] == "0.0%" else text


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    scale = 0
    while number >= 999.5 and scale < len(units) - 1:
        number /= step
        scale += 1
    digits = f"{number:.0f}" if scale == 0 and number == round(number) else _digits(number)
    return f"{digits} {units[scale]}".rstrip()


def _digits(number: float) -> str:
    """Format a number with three digits."""
    return f"{number:,.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def color_system() -> Literal["auto"] | None:
    """Return the color system for rich. With NO_COLOR, text is not bold or dim either."""
    return None if os.environ.get("NO_COLOR") else "auto"


def console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr, without colours if it is not a terminal."""
    from rich.console import Console

    return Console(stderr=stderr, color_system=color_system())


def line(console: Console, words: str, style: str | None = None) -> None:
    """Print text that may come from a file. Markup and control characters have no effect."""
    console.print(plain(words), style=style, highlight=False, markup=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Make a table. The first column is left-aligned, the others right. Long cells are wrapped."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True
    )
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))  # text, not markup
    return made


def track(items: Sequence[T], label: str) -> Iterator[T]:
    """Yield the items. After one second, show a progress bar on stderr if it is a terminal."""
    from rich.progress import Progress

    with _progress(label, Progress.get_default_columns) as update:
        for done, item in enumerate(items, start=1):
            yield item
            if update is not None:
                update(done, len(items))


@contextmanager
def track_bytes(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback for bytes done and in total. It shows a progress bar as `track` does."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    def columns() -> tuple[Any, ...]:
        sizes = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
        return (TextColumn("{task.description}"), *sizes)

    with _progress(label, columns) as update:
        yield update


@contextmanager
def _progress(
    label: str, columns: Callable[[], tuple[Any, ...]]
) -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.markup import escape
    from rich.progress import Progress

    begin = time.monotonic()
    with Progress(*columns(), console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(label), total=None, visible=False)

        def update(done: int, total: int) -> None:
            is_long = time.monotonic() - begin > _PATIENCE_S
            progress.update(task, completed=done, total=total, visible=is_long)

        yield update
