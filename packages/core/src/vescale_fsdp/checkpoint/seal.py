"""Stage, seal, publish: a checkpoint is under its name when all of it is on the disk, or never.

::

    runs/
      step-100/                       sealed: manifest.json and data files, never written again
      step-200.tmp-3f0c...(32)/       staged: a save that is under way, or one that was killed

The first rank makes the stage and holds a lock on it (``flock`` on the folder, which the system
drops when the process ends, however it ends). All ranks write their files there and flush them.
Then the first rank writes the manifest, flushes it and the folder, renames the folder, and flushes
the parent. Two jobs have two stages, and only one of them gets the name.

A stage that nobody holds was left by a crash. The next save beside it deletes it: the files that
a save writes, and the folder if it is empty then.
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
    """The name of a rank's data file."""
    return f"rank-{rank:05d}.bin"


def is_stage(path: Path) -> bool:
    """Whether a name is that of a stage."""
    return _STAGE.fullmatch(path.name) is not None


def stages_of(target: Path) -> list[Path]:
    """The stages for a checkpoint that are there, of whatever job."""
    if not target.parent.is_dir():
        return []
    return sorted(
        path
        for path in target.parent.iterdir()
        if (found := _STAGE.fullmatch(path.name)) and found[1] == target.name
    )


class Stage:
    """A folder beside the target, made and held by the first rank.

    Args:
        into: the target may be a folder that exists, to `merge` into.
    """

    def __init__(self, target: Path, *, into: bool = False) -> None:
        self.id = secrets.token_hex(16)
        self.target = target
        self.path = target.with_name(f"{target.name}.tmp-{self.id}")
        if os.path.lexists(target) and not (into and target.is_dir()):
            raise CheckpointExistsError(
                f"{target} exists already, and a checkpoint is never overwritten; save to another "
                "path"
            )
        with write_errors(self.path):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._make()

    def _make(self) -> int | None:
        """Make the folder. It has another name, and nothing in it, until it is locked."""
        while True:
            unlocked = self.target.with_name(f".{self.target.name}.new-{secrets.token_hex(16)}")
            unlocked.mkdir()
            lock = None
            try:
                lock = _lock(unlocked)
                unlocked.rename(self.path)
                return lock
            except (FileNotFoundError, CheckpointWriteError):
                # Another job's `clean` took it for one that was left: make the next.
                if lock is not None:
                    os.close(lock)

    def publish(self, data: bytes | None) -> None:
        """Write the manifest, if there is one, and give the checkpoint its name."""
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
        """Move files into the target, a folder that exists, in this order."""
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
        """Delete it, after an error. What cannot be deleted now, the next save deletes."""
        with contextlib.suppress(OSError):
            remove(self.path)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def clean(folder: Path) -> None:
    """Delete the stages in a folder that nobody holds any more."""
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
            continue  # it is being written
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
    """Delete a checkpoint or a stage: the manifest first, what we wrote, the folder if empty."""
    (path / manifest.NAME).unlink(missing_ok=True)
    for file in list(path.iterdir()):
        if _DATA.fullmatch(file.name):
            file.unlink(missing_ok=True)
    path.rmdir()


def _lock(path: Path) -> int | None:
    """Lock a folder for this process; None where the file system cannot."""
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
