"""Files whose names come from a checkpoint are opened here: regular ones, and nothing else.

A FIFO would be waited for until somebody writes to it, a device could do anything.
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

from vescale_fsdp.errors import CheckpointCorruptError

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: Path, label: str = "") -> io.FileIO:
    """Open a file to read it, without a buffer. Links are followed.

    Args:
        label: what is in it, for the message.

    Raises:
        CheckpointCorruptError: it is no regular file.
        OSError: it is not there, or cannot be opened.
    """
    _check(path, os.stat(path), label)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check(path, os.fstat(descriptor), label)  # it may have been replaced meanwhile
        return io.FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most_bytes: int, first: bytes = b"") -> bytes:
    """All bytes of a file.

    Args:
        most_bytes: a longer file is refused before it is read.
        first: so is one that does not begin with these bytes.

    Raises:
        CheckpointCorruptError: it is no regular file, or refused.
        OSError: it is not there, or cannot be read.
    """
    with open_regular(path) as stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        if num_bytes > most_bytes:
            raise CheckpointCorruptError(
                f"{path} is refused: it has {num_bytes} bytes, expected {most_bytes} at most. It "
                "was damaged or made by hand; load another one"
            )
        found = stream.read(len(first))
        if found != first:
            raise CheckpointCorruptError(
                f"{path} is refused: it begins with {found!r}, expected {first!r}. It was "
                "damaged, or is of another format"
            )
        return found + stream.read()


def size_of(path: Path, label: str = "") -> int:
    """The bytes of a file. Raises as `open_regular` does."""
    status = os.stat(path)
    _check(path, status, label)
    return status.st_size


def _check(path: Path, status: os.stat_result, label: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        within = f", with {label} in it," if label else ""
        raise CheckpointCorruptError(
            f"{path}{within} is {kind}, expected a regular file: put the file that was saved back, "
            "or use another checkpoint"
        )
