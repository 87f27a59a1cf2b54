"""A progress bar for work that takes longer than a second, where somebody watches."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

_PATIENCE_S = 1.0

T = TypeVar("T")


def color_system() -> Literal["auto"] | None:
    """For rich: with NO_COLOR, nothing is bold or dim either."""
    return None if os.environ.get("NO_COLOR") else "auto"


def track(items: Sequence[T], label: str) -> Iterator[T]:
    """The items one by one; a bar on stderr from the second second on, if it is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    begin = time.monotonic()
    console = Console(stderr=True, color_system=color_system())
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(label, total=len(items), visible=False)
        for item in items:
            yield item
            progress.update(task, advance=1, visible=time.monotonic() - begin > _PATIENCE_S)


@contextmanager
def track_bytes(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives what is to be told the bytes so far and of all; shown as `track` does."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    begin = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True, color_system=color_system())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(escape(label), total=None, visible=False)

        def show(done: int, total: int) -> None:
            is_long = time.monotonic() - begin > _PATIENCE_S
            progress.update(task, completed=done, total=total, visible=is_long)

        yield show
