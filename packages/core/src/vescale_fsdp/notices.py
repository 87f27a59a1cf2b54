"""Warnings to users, which point at a line of their own code. Standard library only."""

from __future__ import annotations

import sys
import warnings
from typing import Any, TypeVar

_OURS = ("vescale_fsdp", "vescale_fsdp_lightning", "vescale_fsdp_accelerate")
# Libraries that call FSDP2's setters by themselves: their users cannot leave the calls out.
_CLIENTS = (
    "torch",
    "accelerate",
    "transformers",
    "trl",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
)

ValueT = TypeVar("ValueT")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is neither of this project nor of torch."""
    level = 2
    while _package_at(level) in (*_OURS, "torch"):
        level += 1
    warnings.warn(message, category, stacklevel=level)


def warn_no_effect(setter: str, why: str) -> None:
    """Warn that a setter does nothing here, unless a library has called it by itself."""
    level = 2
    while _package_at(level) in _OURS:
        level += 1
    if _package_at(level) not in _CLIENTS:
        warnings.warn(f"{setter} has no effect here: {why}", stacklevel=level)


def renamed(where: str, old_name: str, old: Any, new_name: str, new: ValueT) -> ValueT:
    """The value of an option that may be given by its former name, with a warning then.

    None means not given.

    Raises:
        ValueError: it is given by both.
    """
    if old is None:
        return new
    if new is not None:
        raise ValueError(
            f"{where}: {old_name} is the former name of {new_name}, and both were given; leave "
            f"out {old_name}"
        )
    warn_user(
        f"{where}: {old_name} is now called {new_name}; the former name works until version 1.0",
        FutureWarning,
    )
    return old  # type: ignore[no-any-return]


def _package_at(level: int) -> str:
    """The package of the frame that ``stacklevel=level`` would name in the caller's warning."""
    try:
        frame = sys._getframe(level)
    except ValueError:  # no caller is left
        return ""
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]
