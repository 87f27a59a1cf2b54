"""Work on the stream that owns the engine's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def on_lane(method: Callable[P, R]) -> Callable[P, R]:
    """Have a method of an object with a ``pool`` queue its work on the stream that owns memory."""

    @functools.wraps(method)
    def queued(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        lane = owner.pool.lane
        if lane.is_current:
            return method(*args, **kwargs)
        with lane.entered():
            return method(*args, **kwargs)

    return queued
