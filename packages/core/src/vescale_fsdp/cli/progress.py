"""A progress bar for work that takes longer than a second, where somebody watches."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

__all__ = ["color_system", "track"]

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
