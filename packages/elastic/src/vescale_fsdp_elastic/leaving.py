"""Remembers that a loop was left early on purpose, so that a restart does not train on.

A script leaves a loop by ``break``, and a rank dies after the context: torchrun starts all ranks
again, from the beginning of the script. A file in the run's folder says where the loop was left::

    attempt 1   step 17 | break | left.json | step-18-attempt-1 | export: a rank is killed
    attempt 2   step 18 from disk | the same loop has no steps  | export

A job that is submitted again goes on with step 18: torchrun has not restarted it. The file is
deleted then, and also when a state of another step is restored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vescale_fsdp.spi import Ranks
from vescale_fsdp_elastic.meeting import MEETING

_log = logging.getLogger(__name__)
_NAME = "left.json"
_BEGUN: set[Path] = set()  # folders of this process: a second training of one is no restart


@dataclass(frozen=True)
class Left:
    """Where a loop was left.

    Attributes:
        step: number of steps made.
        until: number of steps at the end of the loop.
        loops: how many loops in a row to this end the script had begun.
        attempt: the last one that has ended with it.
        job: that was running.
    """

    step: int
    until: int
    loops: int
    attempt: int
    job: str | None

    def holds(self, step: int, attempt: int, restarts: int) -> bool:
        """Whether a restart of the same job begins here.

        Args:
            step: of the state that was restored.
            attempt: that begins with it.
            restarts: by torchrun in this job. An earlier job may have had the same name: its last
                attempt is further away than these.
        """
        is_same = self.step == step and self.job == _job() and restarts > 0
        return is_same and (bool(os.environ.get(MEETING)) or attempt - self.attempt <= restarts)


def _job() -> str | None:
    return os.environ.get(MEETING) or os.environ.get("TORCHELASTIC_RUN_ID")


def find(ranks: Ranks, directory: Path, step: int, attempt: int, *, goes_on: bool) -> Left | None:
    """Return where the loop was left before this restart, else None. Collective.

    Args:
        goes_on: a training is under way in this process, or in one that it joins.
    """

    is_first = directory.absolute() not in _BEGUN
    _BEGUN.add(directory.absolute())

    def restarts() -> int | None:
        if goes_on or not is_first:
            return None
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def combine(told: list[int | None]) -> list[Any]:
        found = _read(directory)
        counts = [each for each in told if each is not None]
        # torchrun counts on the host of the rank that has failed only.
        if (
            found is not None
            and len(counts) == len(told)
            and found.holds(step, attempt, max(counts))
        ):
            _write(directory, replace(found, attempt=attempt))
            return [asdict(found)] * len(told)
        with contextlib.suppress(OSError):
            (directory / _NAME).unlink()
        return [None] * len(told)

    found = ranks.together("the search for a loop that was left", restarts, combine)
    return None if found is None else Left(**found)


def _read(directory: Path) -> Left | None:
    try:
        return Left(**json.loads((directory / _NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(directory: Path, left: Left) -> None:
    file = directory / _NAME
    temporary = file.with_name(f"{_NAME}.tmp")
    try:
        temporary.write_text(json.dumps(asdict(left)))
        temporary.replace(file)
    except OSError as error:
        _log.warning(
            "%s cannot be written, so that the loop would go on after a restart: %s", file, error
        )


class Leaving:
    """The loops of one process, and whether the last one is left early.

    Args:
        directory: of the run.
        found: what `find` has returned.
    """

    def __init__(self, directory: Path, found: Left | None) -> None:
        self._directory, self._found = directory, found
        self._until: int | None = None
        self._loops = 0

    def begin(self, until: int, step: int) -> bool:
        """A loop begins. Returns whether it was left at this step, before a restart."""
        self._loops = self._loops + 1 if until == self._until else 1
        self._until, found = until, self._found
        if found is None or (found.until, found.step) != (until, step):
            return False
        is_left = self._loops <= found.loops
        if is_left and _is_first():
            _log.info(
                "the loop to step %d was left at step %d, before torchrun restarted this job: it "
                "has no more steps. To train on, start the job again",
                until,
                step,
            )
        return is_left

    def end(self, step: int, attempt: int) -> None:
        """The training ends after this number of steps."""
        if self._until is not None and step < self._until and _is_first():
            _write(self._directory, Left(step, self._until, self._loops, attempt, _job()))


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
