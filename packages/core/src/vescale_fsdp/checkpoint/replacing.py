"""Replaces what was saved under the same name, completely or not at all.

`save` never overwrites a checkpoint. Programs that save under one name again and again (Lightning's
``last.ckpt``) write the new one beside it, and then rename both::

    last.ckpt.new     written completely
    last.ckpt         -> last.ckpt.old
    last.ckpt.new     -> last.ckpt
    last.ckpt.old     deleted

If the process is killed at any point, there is a complete checkpoint under one of the names.
`Place.found` returns it, and `Place.mend` restores the names before the next save.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Self

from vescale_fsdp.checkpoint.files import flush
from vescale_fsdp.checkpoint.manifest import NAME

# A complete directory has one of these, which are written last: our manifest, or torch's metadata.
SEALS = (NAME, ".metadata")


class LocalFiles:
    """The local file system, with the names of fsspec's methods."""

    exists = staticmethod(os.path.lexists)  # also a link to what is gone: it is in the way
    isfile = staticmethod(os.path.isfile)
    makedirs = staticmethod(os.makedirs)

    def ls(self, path: str, detail: bool = False) -> list[str]:
        """The names in a directory; none in a link to what is gone."""
        assert not detail, "only names"
        return os.listdir(path) if os.path.exists(path) else []

    def rm(self, path: str, recursive: bool = False) -> None:
        """Delete a file, a link or, with ``recursive``, a directory."""
        if recursive and os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def mv(self, path: str, target: str, recursive: bool = False) -> None:
        """Rename a file or a directory, and flush the name."""
        os.rename(path, target)
        flush(Path(target).parent)


class Place:
    """The path of a file or directory that a save may replace.

    Args:
        path: of the checkpoint.
        fs: the file system; an object with these methods of fsspec's. Default: the local one.
    """

    def __init__(self, path: str | os.PathLike[str], fs: Any = None) -> None:
        self.path: str = os.fspath(path)
        self.fs: Any = fs or LocalFiles()

    def beside(self, end: str) -> Self:
        """The path with ``end`` added to its name."""
        return type(self)(self.path + end, self.fs)

    @property
    def exists(self) -> bool:
        """Whether there is anything."""
        return bool(self.fs.exists(self.path))

    @property
    def is_file(self) -> bool:
        """Whether there is a file."""
        return bool(self.fs.isfile(self.path))

    def has(self, name: str) -> bool:
        """Whether the directory has a file with this name."""
        return bool(self.fs.isfile(f"{self.path}/{name}"))

    @property
    def is_whole(self) -> bool:
        """Whether there is a complete checkpoint. A file has its name only when it is complete."""
        return self.is_file or any(self.has(name) for name in SEALS)

    def remove(self) -> None:
        """Delete the file or the directory, if there is one."""
        if self.exists:
            self.fs.rm(self.path, recursive=True)

    def move_to(self, other: Place) -> None:
        """Rename it. Nothing may exist at the new name."""
        self.fs.mv(self.path, other.path, recursive=not self.is_file)

    def found(self) -> Self:
        """The complete checkpoint of this name: here, or where a killed save has left it."""
        for place in (self, self.beside(".new"), self.beside(".old")):
            if place.is_whole:
                return place
        return self

    def mend(self) -> None:
        """Restore the names after a save that was killed. Call it on one rank only."""
        if not self.exists:
            whole = self.found()
            if whole.path != self.path and whole.is_whole:
                whole.move_to(self)
        for left in (self.beside(".new"), self.beside(".old")):
            left.remove()

    def replace_by(self, new: Place) -> None:
        """Rename ``new``, which is complete, to this name. Call it on one rank only."""
        old = self.beside(".old")
        if isinstance(self.fs, LocalFiles) and new.is_file and (self.is_file or not self.exists):
            os.replace(new.path, self.path)  # at no moment is there none
            flush(Path(self.path).parent)
            return
        if self.exists:
            self.move_to(old)
        new.move_to(self)
        old.remove()
