"""The errors of veScale-FSDP, all with one base class.

If FSDP2 raises a built-in type for the same mistake (``ValueError``, ``RuntimeError``),
the engine raises the same type, so that code written for FSDP2 keeps working. The types here
are for mistakes that FSDP2 does not detect.
"""

from __future__ import annotations

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
