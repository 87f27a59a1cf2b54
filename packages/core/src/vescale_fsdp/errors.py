"""The errors of veScale-FSDP, all with one base class, and its warnings.

If FSDP2 raises a built-in type for the same mistake (``ValueError``, ``RuntimeError``),
the engine raises the same type, so that code written for FSDP2 keeps working. The types here
are for mistakes that FSDP2 does not detect.

Warnings point at a line of the user's own code. Standard library only.
"""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec

__all__ = [
    "CheckpointCorruptError",
    "CheckpointExistsError",
    "CheckpointIncompleteError",
    "CheckpointMismatchError",
    "CheckpointValueError",
    "CheckpointWriteError",
    "NonFiniteError",
    "PlanError",
    "RankMismatchError",
    "VeScaleError",
]


class VeScaleError(Exception):
    """Base of all errors of veScale-FSDP. The message names the fault, its place and a fix."""


class PlanError(VeScaleError, ValueError):
    """The planner cannot lay out these tensors, shards or alignment."""


class RankMismatchError(VeScaleError, RuntimeError):
    """Ranks disagree about the model, the plan or the order of work.

    Raised on every rank, before the collective that would hang or mix up data; or when a
    rank does not arrive at one in time.
    """


class NonFiniteError(VeScaleError, RuntimeError):
    """A gradient holds NaN or infinity, on this rank or on another."""


class CheckpointCorruptError(VeScaleError, RuntimeError):
    """A checkpoint's bytes differ from those that were saved."""


class CheckpointIncompleteError(VeScaleError, RuntimeError):
    """A checkpoint lacks files or entries that the model or optimizer needs."""


class CheckpointMismatchError(VeScaleError, ValueError):
    """A checkpoint has entries of other shapes or kinds than the model or optimizer."""


class CheckpointValueError(VeScaleError, TypeError):
    """A state holds a value that would need pickle, which can run code on load."""


class CheckpointWriteError(VeScaleError, OSError):
    """A checkpoint cannot be written: disk full, no permission, no such folder."""


class CheckpointExistsError(CheckpointWriteError, FileExistsError):
    """The path exists already. A checkpoint is never overwritten."""


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


def warn_user(message: str) -> None:
    """Warn at the innermost line that is neither of this project nor of torch."""
    level = 2
    while _package_at(level) in (*_OURS, "torch"):
        level += 1
    warnings.warn(message, stacklevel=level)


def warn_no_effect(setter: str, why: str) -> None:
    """Warn that a setter does nothing here, unless a library has called it by itself."""
    level = 2
    while _package_at(level) in _OURS:
        level += 1
    if _package_at(level) not in _CLIENTS:
        warnings.warn(f"{setter} has no effect here: {why}", stacklevel=level)


def _package_at(level: int) -> str:
    """The package of the frame that ``stacklevel=level`` would name in the caller's warning."""
    try:
        frame = sys._getframe(level)
    except ValueError:  # no caller is left
        return ""
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def companion(package: str, asks: str, install: str) -> None:
    """Check that a package is installed that is not part of the core.

    Args:
        asks: what the user has written that needs it.
        install: what pip is to install.

    Raises:
        ImportError: it is not there.
    """
    if find_spec(package) is None:
        raise ImportError(
            f"{asks} needs {package}, which is not installed: pip install '{install}'"
        )
