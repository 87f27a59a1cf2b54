"""Paths of checkpoints, on a local file system or on any that fsspec supports.

A checkpoint that is saved again under its name (``last.ckpt``) is never overwritten. The new one is
written beside it, and then both are renamed::

    last.ckpt.new     written completely
    last.ckpt         -> last.ckpt.old
    last.ckpt.new     -> last.ckpt
    last.ckpt.old     deleted

If the process is killed at any point, there is a complete checkpoint under one of the names.
`found` returns it, and `mend` restores the names before the next save.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from vescale_fsdp.ranks import everyone

__all__ = ["Place", "agree", "from_first"]

_WHAT = "the save or load of a checkpoint"

# A complete directory has one of these: our manifest, or the metadata of torch's format. They are
# written last.
_SEALS = ("manifest.json", ".metadata")
# A directory has this file during a copy to another file system. It is written first, deleted last.
_UNDER_WAY = "upload-under-way"


class Place:
    """A path, and the file system that it is on."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fs, found = url_to_fs(os.fspath(path))
        self.path: str = found.rstrip("/") or found
        self.is_local = type(self.fs) is LocalFileSystem  # subclasses may translate paths

    def beside(self, end: str) -> Place:
        """Return the path with ``end`` added to its name."""
        other = object.__new__(Place)
        other.fs, other.path, other.is_local = self.fs, self.path + end, self.is_local
        return other

    def __str__(self) -> str:
        return self.path if self.is_local else str(self.fs.unstrip_protocol(self.path))

    @property
    def exists(self) -> bool:
        return bool(self.fs.exists(self.path))

    @property
    def is_file(self) -> bool:
        return bool(self.fs.isfile(self.path))

    def has(self, name: str) -> bool:
        """Whether the directory has a file with this name."""
        return bool(self.fs.isfile(posixpath.join(self.path, name)))

    @property
    def is_whole(self) -> bool:
        return self.is_file or any(self.has(name) for name in _SEALS)

    @property
    def is_left_over(self) -> bool:
        """Whether it is an incomplete checkpoint from an interrupted copy."""
        return not self.is_whole and self.has(_UNDER_WAY)

    def remove(self) -> None:
        """Delete the file or the directory, if there is one."""
        if self.exists:
            self.fs.rm(self.path, recursive=True)

    def move_to(self, other: Place) -> None:
        """Rename it. Nothing may exist at the new name."""
        if self.is_local:
            os.rename(self.path, other.path)
        else:
            self.fs.mv(self.path, other.path, recursive=not self.is_file)

    # Replacing a checkpoint of the same name

    def found(self) -> Place:
        """Return the complete checkpoint of this name: here, or where a killed save has left it."""
        for place in (self, self.beside(".new"), self.beside(".old")):
            if place.is_whole:
                return place
        return self

    def mend(self) -> None:
        """Restore the names after a save that was killed. Call it in one process only."""
        new, old = self.beside(".new"), self.beside(".old")
        if self.is_left_over:
            self.remove()
        if not self.exists:
            whole = self.found()
            if whole.path != self.path and whole.is_whole:
                whole.move_to(self)
        for left in (new, old):
            left.remove()

    def replace_by(self, new: Place) -> None:
        """Rename ``new``, which is complete, to this name. Call it in one process only."""
        old = self.beside(".old")
        if self.is_local and new.is_file and (self.is_file or not self.exists):
            os.replace(new.path, self.path)
            return
        if self.exists:
            self.move_to(old)
        new.move_to(self)
        old.remove()


def from_first(what: Callable[[], Any]) -> Any:
    """Call a function in the first process. All return its result, JSON, or all raise."""
    return everyone().from_first(_WHAT, what)


def agree(work: Callable[[], None]) -> None:
    """Call a function in every process. If it raises in one, all raise. Collective."""
    everyone().together(_WHAT, work)


# Copies to and from other file systems


def stage(folder: str | None) -> Path:
    """Make a temporary folder for a checkpoint before its upload. Collective."""
    parent = folder or tempfile.gettempdir()
    made: str = from_first(lambda: tempfile.mkdtemp(prefix="vescale-fsdp-", dir=parent))
    return Path(made)


def upload(source: Path, target: Place) -> None:
    """Copy a complete checkpoint to another file system. Collective.

    Each process copies a part of the files; manifest or metadata are copied last. An interrupted
    copy leaves a directory with a marker file. The next save under this name deletes it.
    """
    if source.is_file():
        from_first(lambda: _put(source, target))
        return
    ranks = everyone()
    files = sorted(path for path in source.iterdir() if path.name not in _SEALS)

    def put_mine() -> None:
        for path in files[ranks.rank :: ranks.size]:
            target.fs.put_file(str(path), posixpath.join(target.path, path.name))
            ranks.still()

    def begin() -> None:
        target.fs.makedirs(target.path, exist_ok=True)
        target.fs.pipe_file(posixpath.join(target.path, _UNDER_WAY), source.name.encode())

    from_first(begin)
    agree(put_mine)
    seals = [path for path in source.iterdir() if path.name in _SEALS]

    def put_seals() -> None:
        for path in seals:
            target.fs.put_file(str(path), posixpath.join(target.path, path.name))
        target.fs.rm_file(posixpath.join(target.path, _UNDER_WAY))

    from_first(put_seals)


def _put(source: Path, target: Place) -> None:
    target.fs.makedirs(posixpath.dirname(target.path), exist_ok=True)
    target.fs.put_file(str(source), target.path)


def download(source: Place, local_rank: int) -> Path:
    """Copy a checkpoint to a temporary folder on each machine. Collective.

    Returns:
        The path of the copy. The caller deletes its parent folder.
    """
    token: str = from_first(lambda: secrets.token_hex(8))
    folder = Path(tempfile.gettempdir()) / f"vescale-fsdp-{token}"
    target = folder / posixpath.basename(source.path)

    def get() -> None:
        if local_rank == 0:
            folder.mkdir(mode=0o700)
            source.fs.get(source.path, str(target), recursive=not source.is_file)

    agree(get)
    return target


def clear(folder: Path, *, is_mine: bool, waits: bool = True) -> None:
    """Delete a folder of `stage` or `download`, if it ``waits`` after all processes have come."""
    if waits:
        everyone().together(_WHAT, lambda: None)
    if is_mine:
        shutil.rmtree(folder, ignore_errors=True)
