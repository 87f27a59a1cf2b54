"""Numbers the attempts of a run, and ends an attempt when a later one has begun elsewhere.

torchrun decides by heartbeats who is there. A host that was cut off, or was too slow to answer, may
train on in a world of its own, beside the world of the others. Both would write to one folder. So
each attempt makes a file with its number in that folder; only one can. An attempt that finds a
later number ends::

    runs/a/attempt-2      hosts A and B
    runs/a/attempt-3      host B was cut off, and its agent has started it again

    A   step 10 | 20 | finds attempt 3: ends; torchrun lets it wait until B takes it in
    B                  | step 20 | 30 | restarts with A as attempt 4, from its own step 30
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.spi import write_errors

NAMES = "step-*-attempt-*"  # of the checkpoints on disk
_FILE = re.compile(r"attempt-([0-9]+)")


def name_of(step: int, attempt: int) -> str:
    """The name of a checkpoint on disk."""
    return f"step-{step}-attempt-{attempt}"


def last(directory: Path) -> int:
    """The highest number in a run's folder; 0 if there is none. Cost: one listing of the folder."""
    names = (_FILE.fullmatch(each.name) for each in directory.iterdir())
    return max((int(name[1]) for name in names if name), default=0)


def claim(directory: Path, least: int) -> int:
    """Take a number that no other attempt has, and delete the files of earlier ones.

    Args:
        least: the number is at least this.
    """
    number = max(least, last(directory) + 1)
    with write_errors(directory / f"attempt-{number}"):
        while True:
            try:
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
                os.close(os.open(directory / f"attempt-{number}", flags, 0o644))
                break
            except FileExistsError:
                number += 1
        for each in list(directory.iterdir()):
            name = _FILE.fullmatch(each.name)
            if name and int(name[1]) < number:
                with contextlib.suppress(FileNotFoundError):
                    each.unlink()
    return number


def check(directory: Path, number: int) -> None:
    """Raise if an attempt later than ``number`` has begun.

    Raises:
        RankMismatchError: there is one.
    """
    found = last(directory)
    if found > number:
        raise RankMismatchError(
            f"attempt {number} of the run in {directory} ends here: attempt {found} has begun on "
            "other ranks. These ranks were cut off from those, or the run was started twice. "
            "Under torchrun they are started again and join the others"
        )
