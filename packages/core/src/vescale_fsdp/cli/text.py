"""Formats output: amounts with three digits and a unit, tables, progress bars, errors of input."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PATIENCE_S = 1.0


class InputError(Exception):
    """Bad input. ``main`` prints the message as one line on stderr and returns exit code 2."""


def count(number: float) -> str:
    """Format a number of elements: "3.23 bn" for 3_232_931_520. Not "B", which means bytes here."""
    return scaled(number, 1000, ("", "K", "M", "bn", "tn"))


def several(number: int, noun: str) -> str:
    """Format a number with a noun: ``1 unit``, ``37 units``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def plain(text: str) -> str:
    """Escape control characters and line breaks in ``text``, as in ``\\x1b``."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def binary(num_bytes: float) -> str:
    """Format bytes in powers of 1,024: "2.00 GiB" for 2**31."""
    return scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def scaled(number: float, step: int, units: Sequence[str]) -> str:
    """Format a number with three digits and a unit, of which each is ``step`` of the one before."""
    scale = 0
    while number >= 999.5 and scale < len(units) - 1:
        number /= step
        scale += 1
    text = f"{number:.0f}" if scale == 0 and number == round(number) else digits(number)
    return f"{text} {units[scale]}".rstrip()


def digits(number: float) -> str:
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


@contextmanager
def track_bytes(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback for bytes done and in total, which shows them after a second."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    def columns() -> tuple[Any, ...]:
        sizes = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
        return (TextColumn("{task.description}"), *sizes)

    with progress_bar(label, columns) as update:
        yield update


@contextmanager
def progress_bar(
    label: str, columns: Callable[[], tuple[Any, ...]]
) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback for what is done and for all, or None if stderr is no terminal."""
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
