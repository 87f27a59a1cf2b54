"""The errors that users of veScale-FSDP can catch, all under one base.

Where FSDP2 raises a built-in type for the same mistake (``ValueError``, ``RuntimeError``),
the engine raises that type too, so that code written for FSDP2 keeps working. The types here
are for what FSDP2 does not notice.
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
    """Base of every error that is ours. The message says what, where, and what to do."""


class PlanError(VeScaleError, ValueError):
    """The planner was given tensors, shards or an alignment that it cannot lay out."""


class RankMismatchError(VeScaleError, RuntimeError):
    """Ranks disagree about the model, the plan or the order of work.

    Raised on every rank, before the collective that would have hung or mixed up data; or when a
    rank has not come to one in time.
    """


class NonFiniteError(VeScaleError, RuntimeError):
    """A gradient holds NaN or infinity, on this rank or on another."""


class CheckpointCorruptError(VeScaleError, RuntimeError):
    """A checkpoint's bytes are not those that were saved."""


class CheckpointIncompleteError(VeScaleError, RuntimeError):
    """A checkpoint lacks files or entries that the model or optimizer needs."""


class CheckpointMismatchError(VeScaleError, ValueError):
    """A checkpoint has entries of other shapes or kinds than the model or optimizer."""


class CheckpointValueError(VeScaleError, TypeError):
    """A state holds something that a checkpoint cannot keep without running code on load."""


class CheckpointWriteError(VeScaleError, OSError):
    """A checkpoint cannot be written: disk full, no permission, no such folder."""


class CheckpointExistsError(CheckpointWriteError, FileExistsError):
    """There is something at the path already. A checkpoint is never overwritten."""
