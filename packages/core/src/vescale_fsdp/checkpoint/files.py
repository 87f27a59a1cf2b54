"""Writes and reads data files, with the CRC32 of each item.

Items are written once, one after the other, and read by their spans. Only regular files are opened:
to open a FIFO could wait forever, and a device could do anything. Errors name the file and the
item.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import torch

from vescale_fsdp.checkpoint.manifest import Span
from vescale_fsdp.dbuffer import mapped_empty
from vescale_fsdp.errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointWriteError,
)

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: Path, label: str = "") -> io.FileIO:
    """Open a regular file to read it, without a buffer. Links are followed.

    Args:
        label: names the contents in messages.
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
        most_bytes: raise, before reading, if the file is longer.
        first: raise if the file does not begin with these bytes.
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
    """Return the size of a file in bytes. Raises as `open_regular` does."""
    status = os.stat(path)
    _check(path, status, label)
    return status.st_size


def _check(path: Path, status: os.stat_result, label: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        within = f" (for {label})" if label else ""
        raise CheckpointCorruptError(
            f"{path}{within} is {kind}, expected a regular file: restore the saved file, or use "
            "another checkpoint"
        )


Progress = Callable[[int], None]  # called with the number of bytes that have been read
_HUGE = 1 << 24  # bytes; malloc reuses memory for smaller allocations
_PIECE = 1 << 20  # bytes per read; small enough that their CRC32 is computed from the cache
_MOST_OPEN = 64  # files


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor. The caller keeps the tensor alive."""
    assert tensor.is_contiguous(), "there is one run of bytes"
    assert tensor.device.type == "cpu", "it can be read from here"
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def _memory(num_bytes: int) -> torch.Tensor:
    """Allocate uint8, [num_bytes]; large ones in huge pages, whose page faults cost less."""
    if num_bytes < _HUGE:
        return torch.empty(num_bytes, dtype=torch.uint8)
    return mapped_empty(num_bytes, torch.uint8, torch.device("cpu"))


class DataWriter:
    """Writes items one after the other into a new file. The first `write` creates it.

    Args:
        overwrites: a file that is there is written again, and gets the new length. In memory this
            costs a tenth of a new file, whose pages the kernel would have to find and clear.
    """

    def __init__(self, folder: Path, name: str, *, overwrites: bool = False) -> None:
        self.path, self.name = folder / name, name
        self._overwrites = overwrites
        self.num_bytes = 0
        self._stream: BinaryIO | None = None

    def write(self, data: memoryview, label: str) -> Span:
        """Append an item. Returns its span with its CRC32."""
        with write_errors(self.path, label):
            if self._stream is None:
                mode: Literal["r+b", "xb"] = (
                    "r+b" if self._overwrites and self.path.exists() else "xb"
                )
                self._stream = open(self.path, mode, buffering=1 << 20)  # noqa: SIM115
            self._stream.write(data)
        span = Span(self.name, self.num_bytes, len(data), zlib.crc32(data))
        self.num_bytes += len(data)
        return span

    def finish(self) -> None:
        """Flush the file to disk."""
        if self._stream is not None:
            with write_errors(self.path, "the rest of it"):
                self._stream.flush()
                self._stream.truncate()  # if it was longer
                os.fsync(self._stream.fileno())
                self._stream.close()

    def __enter__(self) -> DataWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, also after an error."""
        if self._stream is not None:
            try:
                self._stream.close()
            except OSError:  # the disk is full, also for the buffered data
                self._stream.raw.close()  # type: ignore[attr-defined]


def write_file(path: Path, data: bytes) -> None:
    """Write a small new file and flush it to disk."""
    with DataWriter(path.parent, path.name) as writer:
        writer.write(memoryview(data), "all of it")
        writer.finish()


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, if the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


_REASONS = {
    errno.ENOSPC: "the disk is full ({free} bytes are free): free some space, or save elsewhere",
    errno.EDQUOT: "the quota is used up: free some space, or save elsewhere",
    errno.EROFS: "the file system is read-only: save elsewhere",
    errno.EACCES: "there is no permission to write: change the permissions, or save elsewhere",
    errno.EPERM: "there is no permission to write: change the permissions, or save elsewhere",
    errno.ENOENT: "the folder is gone: was it deleted, or is it not on a file system that all "
    "ranks share?",
    errno.EIO: "the device reports an input/output error",
}


@contextmanager
def write_errors(path: Path, label: str = "") -> Iterator[None]:
    """Replace an ``OSError`` in this context by an error that says what to do."""
    try:
        yield
    except CheckpointWriteError:
        raise
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, str(error))
        if "{free}" in reason:
            reason = reason.format(free=_free_bytes(path.parent))
        subject = f"{label} cannot be written to {path}" if label else f"{path} cannot be made"
        raise CheckpointWriteError(f"{subject}: {reason}") from error


def _free_bytes(folder: Path) -> int | str:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return "an unknown number of"


class DataReader:
    """Reads spans of the data files in a folder.

    Args:
        folder: the checkpoint's.
        sizes: the size that each file must have, in bytes.
        progress: called after each read with the number of bytes.
        advice: the end of error messages.
    """

    def __init__(
        self,
        folder: Path,
        sizes: dict[str, int],
        progress: Progress | None = None,
        advice: str = ". Nothing was loaded; move this checkpoint away and load the one before it",
    ) -> None:
        self.folder, self._sizes = folder, sizes
        self._progress, self._advice = progress, advice
        self._streams: dict[str, BinaryIO] = {}

    def __enter__(self) -> DataReader:
        return self

    def __exit__(self, *_: object) -> None:
        while self._streams:  # a later `read` opens them again
            self._streams.popitem()[1].close()

    def read(self, span: Span, label: str) -> torch.Tensor:
        """Read a span and check its CRC32. Returns uint8, [length]."""
        found = _memory(span.length)
        self._check(self._fill_by_pieces(bytes_of(found), span, label), span, label)
        return found

    def read_part(self, span: Span, first: int, length: int, label: str) -> torch.Tensor:
        """Read some bytes of a span without a check. Returns uint8, [length]."""
        found = _memory(length)
        self.read_into(bytes_of(found), span, first, label)
        return found

    def read_into(self, into: memoryview, span: Span, first: int, label: str) -> None:
        """Read some bytes of a span into existing memory, without a check."""
        if into:
            stream = self._open(span.file, label)
            stream.seek(span.offset + first)
            self._fill(stream, into, span, label)

    def check(self, span: Span, label: str) -> None:
        """Check the CRC32 of a span, with at most 1 MiB of memory. Raises as `read` does."""
        self._check(self._fill_by_pieces(None, span, label), span, label)

    def check_size(self, file: str, label: str) -> None:
        """Raise if a file is missing or has a wrong size."""
        self._open(file, label)

    def _fill_by_pieces(self, into: memoryview | None, span: Span, label: str) -> int:
        """Read a span in pieces that fit the processor's cache. Returns its CRC32.

        Args:
            into: gets the bytes. None: they are only checked.
        """
        crc32 = 0
        if not span.length:
            return crc32
        stream = self._open(span.file, label)
        stream.seek(span.offset)
        spare = torch.empty(min(_PIECE, span.length) if into is None else 0, dtype=torch.uint8)
        for done in range(0, span.length, _PIECE):
            end = min(done + _PIECE, span.length)
            piece = bytes_of(spare)[: end - done] if into is None else into[done:end]
            self._fill(stream, piece, span, label)
            crc32 = zlib.crc32(piece, crc32)
        return crc32

    def _fill(self, stream: BinaryIO, into: memoryview, span: Span, label: str) -> None:
        try:
            filled = 0
            while filled < len(into):
                count = stream.readinto(into[filled:])  # type: ignore[attr-defined]
                if not count:
                    break
                filled += count
        except OSError as error:
            raise CheckpointCorruptError(
                f"{self.folder / span.file} cannot be read in {label}: {error}{self._advice}"
            ) from error
        if filled < len(into):
            raise CheckpointCorruptError(
                f"{self.folder / span.file} ended while {label} was read: the file was truncated"
                f"{self._advice}"
            )
        if self._progress is not None:
            self._progress(filled)

    def _check(self, crc32: int, span: Span, label: str) -> None:
        if crc32 != span.crc32:
            raise CheckpointCorruptError(
                f"{self.folder / span.file} is damaged in {label}: bytes {span.offset} to "
                f"{span.offset + span.length} have the CRC32 {crc32:08x}, expected "
                f"{span.crc32:08x}{self._advice}"
            )

    def _open(self, file: str, label: str) -> BinaryIO:
        if file in self._streams:
            return self._streams[file]
        path = self.folder / file
        try:
            stream = open_regular(path, label)
        except FileNotFoundError as error:
            raise CheckpointIncompleteError(
                f"{path} is missing; it is needed for {label}{self._advice}"
            ) from error
        except OSError as error:
            raise CheckpointIncompleteError(
                f"{path}, with {label}, cannot be opened: {error}"
            ) from error
        num_bytes = os.fstat(stream.fileno()).st_size
        if num_bytes != self._sizes[file]:
            stream.close()
            raise CheckpointCorruptError(
                f"{path} (for {label}) has {num_bytes} bytes, expected "
                f"{self._sizes[file]}{self._advice}"
            )
        if len(self._streams) >= _MOST_OPEN:
            self._streams.pop(next(iter(self._streams))).close()
        self._streams[file] = stream
        return stream
