"""Who hears of writes to sharded and replicated tensors: the engine, while a forward runs.

A forward computes with unsharded views. After a write to a shard in it, by an optimizer's step or
the update of a teacher, the next read has to see what was written. Versions do not tell: fused
kernels and ``.data`` do not raise those of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

hears: Callable[[Iterable[Any]], None] | None = None  # of the tensors that were written to


def hear_of_writes(hear: Callable[[Iterable[Any]], None] | None) -> None:
    """Let ``hear`` be called after each write. None: nobody."""
    global hears
    hears = hear
