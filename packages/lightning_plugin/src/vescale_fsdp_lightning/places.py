"""Paths of checkpoints, on a local file system or on any that fsspec supports.

`vescale_fsdp.checkpoint.Place` replaces a checkpoint of the same name. Here it is on any file
system, to which a local checkpoint is copied when it is complete.
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

from fsspec.callbacks import Callback  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from vescale_fsdp import checkpoint
from vescale_fsdp.ranks import everyone
from vescale_fsdp.spi import SEALS, LocalFiles

__all__ = ["Place", "agree", "from_first"]

_WHAT = "the save or load of a checkpoint"

# A directory has this file during a copy to another file system. It is written first, deleted last.
_UNDER_WAY = "upload-under-way"


class Place(checkpoint.Place):
    """A path on any file system: ``s3://bucket/last.ckpt``."""

    def __init__(self, path: str | os.PathLike[str], fs: Any = None) -> None:
        if fs is None:
            fs, path = url_to_fs(os.fspath(path))
        text = os.fspath(path)
        self.is_local = type(fs) in (LocalFileSystem, LocalFiles)  # subclasses may translate paths
        super().__init__(text.rstrip("/") or text, LocalFiles() if self.is_local else fs)

    def __str__(self) -> str:
        return self.path if self.is_local else str(self.fs.unstrip_protocol(self.path))

    def mend(self) -> None:
        """Restore the names, and delete what an interrupted copy has left. In one process only."""
        if not self.is_whole and self.has(_UNDER_WAY):
            self.remove()
        super().mend()


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
    files = sorted(path for path in source.iterdir() if path.name not in SEALS)

    def put_mine() -> None:
        for path in ranks.going_on(files[ranks.rank :: ranks.size]):
            target.fs.put_file(str(path), posixpath.join(target.path, path.name))

    def begin() -> None:
        target.fs.makedirs(target.path, exist_ok=True)
        target.fs.pipe_file(posixpath.join(target.path, _UNDER_WAY), source.name.encode())

    from_first(begin)
    agree(put_mine)
    seals = [path for path in source.iterdir() if path.name in SEALS]

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
    folder = Path(tempfile.gettempdir(), from_first(lambda: f"vescale-fsdp-{secrets.token_hex(8)}"))
    target = folder / posixpath.basename(source.path)

    def get() -> None:
        if local_rank == 0:
            folder.mkdir(mode=0o700)
            signs = Callback(hooks={"after a file": lambda *_: everyone().still()})
            source.fs.get(source.path, str(target), recursive=not source.is_file, callback=signs)

    agree(get)
    return target


def clear(folder: Path, *, is_mine: bool, waits: bool = True) -> None:
    """Delete a folder of `stage` or `download`, if it ``waits`` after all processes have come."""
    if waits:
        everyone().together(_WHAT, lambda: None)
    if is_mine:
        shutil.rmtree(folder, ignore_errors=True)
