"""Where checkpoints lie: on this machine's file systems, or on any that fsspec knows.

A checkpoint that is saved again under its name (``last.ckpt``) is never written over. The new one
is made whole beside it, and then the names change::

    last.ckpt.new     made whole
    last.ckpt         -> last.ckpt.old
    last.ckpt.new     -> last.ckpt
    last.ckpt.old     deleted

Killed anywhere on the way, there is a whole checkpoint under one of the names: `found` says which,
and `mend` puts the names right before the next save.
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

import torch.distributed as dist
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

__all__ = ["Place", "agree", "from_first"]

# What a directory has when it is whole: our manifest, the metadata of torch's format. Written last.
_SEALS = ("manifest.json", ".metadata")
# What a directory has while it is copied to another file system. Written first, deleted last.
_UNDER_WAY = "upload-under-way"


class Place:
    """A path, and the file system that it is on."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fs, found = url_to_fs(os.fspath(path))
        self.path: str = found.rstrip("/") or found
        self.is_local = type(self.fs) is LocalFileSystem  # others may translate paths

    def beside(self, end: str) -> Place:
        """The place of the same name with something after it."""
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
        """Whether there is such a file in the directory."""
        return bool(self.fs.isfile(posixpath.join(self.path, name)))

    @property
    def is_whole(self) -> bool:
        return self.is_file or any(self.has(name) for name in _SEALS)

    @property
    def is_left_over(self) -> bool:
        """Whether it is a part of a checkpoint, of a copy that was cut short."""
        return not self.is_whole and self.has(_UNDER_WAY)

    def remove(self) -> None:
        """Delete the file or the directory, if there is one."""
        if self.exists:
            self.fs.rm(self.path, recursive=True)

    def move_to(self, other: Place) -> None:
        """Give it another name, at which there is nothing."""
        if self.is_local:
            os.rename(self.path, other.path)
        else:
            self.fs.mv(self.path, other.path, recursive=not self.is_file)

    # Saved again under the same name

    def found(self) -> Place:
        """This place, or where a save that was killed has left the checkpoint."""
        for place in (self, self.beside(".new"), self.beside(".old")):
            if place.is_whole:
                return place
        return self

    def mend(self) -> None:
        """Put right what a save that was killed has left. For one process."""
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
        """Have ``new``, which is whole, under this name. For one process."""
        old = self.beside(".old")
        if self.is_local and new.is_file and (self.is_file or not self.exists):
            os.replace(new.path, self.path)
            return
        if self.exists:
            self.move_to(old)
        new.move_to(self)
        old.remove()


def from_first(what: Callable[[], Any]) -> Any:
    """What a function returns in the first process; all raise if it raises there. Collective."""
    result: list[Any] = [None, None]
    error: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            result[0] = what()
        except Exception as caught:  # noqa: BLE001  every process must learn of it
            error, result[1] = caught, f"{type(caught).__name__}: {caught}"
    if dist.is_initialized():
        dist.broadcast_object_list(result)
    if result[1] is not None:
        raise error or OSError(f"rank 0: {result[1]}")
    return result[0]


def agree(work: Callable[[], None]) -> None:
    """Do something in every process; all raise if one raises. Collective."""
    error: Exception | None = None
    try:
        work()
    except Exception as caught:  # noqa: BLE001  every process must learn of it
        error = caught
    faults: list[str | None] = [None if error is None else f"{type(error).__name__}: {error}"]
    if dist.is_initialized():
        faults = [None] * dist.get_world_size()
        dist.all_gather_object(
            faults, None if error is None else f"{type(error).__name__}: {error}"
        )
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise error or OSError(f"rank {rank}: {fault}")


# To and from other file systems


def stage(folder: str | None) -> Path:
    """A new folder of this machine for a checkpoint on its way elsewhere. Collective."""
    parent = folder or tempfile.gettempdir()
    made: str = from_first(lambda: tempfile.mkdtemp(prefix="vescale-fsdp-", dir=parent))
    return Path(made)


def upload(source: Path, target: Place) -> None:
    """Copy a whole checkpoint, each process a part of the files, what makes it whole last.

    A copy that is cut short leaves a directory that says so, and that the next save under this
    name deletes. Collective.
    """
    if source.is_file():
        from_first(lambda: _put(source, target))
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = dist.get_world_size() if dist.is_initialized() else 1
    files = sorted(path for path in source.iterdir() if path.name not in _SEALS)

    def put_mine() -> None:
        for path in files[rank::size]:
            target.fs.put_file(str(path), posixpath.join(target.path, path.name))

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
    """Copy a checkpoint to each machine that has a process. Collective.

    Returns:
        Where it is; delete its parent when it has been read.
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


def clear(folder: Path, *, is_mine: bool) -> None:
    """Delete a folder that was made here, when all processes are done with it. Collective."""
    if dist.is_initialized():
        dist.barrier()
    if is_mine:
        shutil.rmtree(folder, ignore_errors=True)
