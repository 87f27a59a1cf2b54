"""A save writes into a stage, a temporary folder, which gets its name when it is complete.

::

    runs/
      step-100/                       sealed: manifest.json and data files, never written again
      step-200.tmp-3f0c...(32)/       a stage: a save that is running, or one that was killed

1. Rank 0 makes the stage and locks it (``flock`` on the folder; the system releases the lock when
   the process ends for any reason).
2. All ranks write their files into it and flush them to disk.
3. Rank 0 writes the manifest, flushes it and the folder, renames the folder, and flushes the
   parent.

If two jobs save to one path, each has its own stage, and only one of them gets the name.

A stage without a lock is left from a crash. The next save in the same folder deletes it: first the
files that a save writes, then the folder if it is empty.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from vescale_fsdp.checkpoint import manifest
from vescale_fsdp.checkpoint.files import flush_folder, write_errors, write_file
from vescale_fsdp.errors import CheckpointExistsError, CheckpointWriteError

_STAGE = re.compile(r"(?s)(.+)\.tmp-[0-9a-f]{32}")
_UNLOCKED = re.compile(r"(?s)\..+\.new-[0-9a-f]{32}")
_DATA = re.compile(
    r"rank-[0-9]{5,}\.bin"  # ours
    r"|model(-[0-9]+-of-[0-9]+)?\.safetensors(\.index\.json)?"
    r"|__[0-9]+_0\.distcp|\.metadata"  # of torch.distributed.checkpoint
)
_log = logging.getLogger(__name__)


def data_name(rank: int) -> str:
    """Return the name of a rank's data file."""
    return f"rank-{rank:05d}.bin"


def is_stage(path: Path) -> bool:
    """Whether the path has the name of a stage."""
    return _STAGE.fullmatch(path.name) is not None


def stages_of(target: Path) -> list[Path]:
    """Return the existing stages of a checkpoint, of any job."""
    if not target.parent.is_dir():
        return []
    return sorted(
        path
        for path in target.parent.iterdir()
        if (found := _STAGE.fullmatch(path.name)) and found[1] == target.name
    )


class Stage:
    """A temporary folder beside the target. Rank 0 makes and locks it.

    Args:
        into: the target may be an existing folder, for `merge`.
    """

    def __init__(self, target: Path, *, into: bool = False) -> None:
        self.id = secrets.token_hex(16)
        self.target = target
        self.path = target.with_name(f"{target.name}.tmp-{self.id}")
        if is_stage(target) or _UNLOCKED.fullmatch(target.name):
            raise CheckpointWriteError(
                f"{target} has a name as of a save that is under way, which the next save would "
                "delete: save to another path"
            )
        if os.path.lexists(target) and not (into and target.is_dir()):
            raise CheckpointExistsError(
                f"{target} exists already, and a checkpoint is never overwritten; save to another "
                "path"
            )
        with write_errors(self.path):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._make()

    def _make(self) -> int | None:
        """Make the folder. Until it is locked it has another name and is empty."""
        while True:
            unlocked = self.target.with_name(f".{self.target.name}.new-{secrets.token_hex(16)}")
            unlocked.mkdir()
            lock = None
            try:
                lock = _lock(unlocked)
                unlocked.rename(self.path)
                return lock
            except (FileNotFoundError, CheckpointWriteError):
                # `clean` of another job has locked or deleted it first: make a new one.
                if lock is not None:
                    os.close(lock)

    def publish(self, data: bytes | None) -> None:
        """Write the manifest, if there is one, and rename the folder to the target."""
        if data is not None:
            write_file(self.path / manifest.NAME, data)
        with write_errors(self.target):
            flush_folder(self.path)
            try:
                os.rename(self.path, self.target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise CheckpointExistsError(
                        f"another job has written {self.target} meanwhile; its files were not "
                        "changed. Give each job its own folder"
                    ) from error
                raise
            flush_folder(self.target.parent)
        self._release()

    def merge(self, names: Sequence[str]) -> None:
        """Move files into the target, an existing folder, in this order."""
        there = [name for name in names if os.path.lexists(self.target / name)]
        if there:
            raise CheckpointExistsError(
                f"{self.target / there[0]} exists already, and is never overwritten; write to "
                "another path, or delete it first"
            )
        moved: list[str] = []
        with write_errors(self.target):
            flush_folder(self.path)
            try:
                for name in names:
                    (self.path / name).rename(self.target / name)
                    moved.append(name)
                flush_folder(self.target)
            except OSError:
                for name in reversed(moved):
                    (self.target / name).rename(self.path / name)
                raise
        self.abandon()

    def abandon(self) -> None:
        """Delete the stage. If that fails, the next save deletes it."""
        with contextlib.suppress(OSError):
            remove(self.path)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def clean(folder: Path) -> None:
    """Delete the stages in a folder that have no lock."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if not (is_stage(path) or _UNLOCKED.fullmatch(path.name)):
            continue
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            lock = _lock(path)
        except CheckpointWriteError:
            continue  # another process writes it
        except OSError:
            continue  # it has just been published or deleted
        if lock is None:
            _log.info(
                "%s may be left over from a crash; file locks do not work here, so it is "
                "not deleted",
                path,
            )
            continue
        try:
            remove(path)
            _log.info("deleted %s, left by a save that did not finish", path)
        except OSError as error:
            _log.warning(
                "%s, left by a save that did not finish, cannot be deleted: %s", path, error
            )
        finally:
            os.close(lock)


def remove(path: Path) -> None:
    """Delete a checkpoint or a stage: the manifest, then the data files, then the empty folder."""
    (path / manifest.NAME).unlink(missing_ok=True)
    for file in list(path.iterdir()):
        if _DATA.fullmatch(file.name):
            file.unlink(missing_ok=True)
    path.rmdir()


def _lock(path: Path) -> int | None:
    """Lock a folder. Returns None if the file system has no locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise CheckpointWriteError(f"{path} is being written by another process") from error
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
