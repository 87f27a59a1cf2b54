"""Boxes of tensors, written into their places in files that were laid out before.

Every writer knows where each element belongs, so that nothing is gathered: a flat range is one run
of bytes, a box of columns one run per row.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vescale_fsdp.checkpoint.disk.files import bytes_of, write_errors
from vescale_fsdp.checkpoint.disk.geometry import runs_of
from vescale_fsdp.checkpoint.safetensors.format import File
from vescale_fsdp.checkpoint.state import tensors

_PIECE = 1 << 25  # bytes that are converted and moved to the host at once


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: the file, its first byte there, and the dtype that it has there."""

    file: str
    offset: int
    dtype: torch.dtype


def make_files(folder: Path, files: Sequence[File]) -> None:
    """Make files with their headers, and take the room on the disk that they will need.

    Raises:
        CheckpointWriteError: there is not so much room.
    """
    for file in files:
        path = folder / file.name
        with write_errors(path, f"{file.num_bytes} bytes"), open(path, "xb") as stream:
            stream.write(file.head)
            stream.flush()
            _take_room(stream.fileno(), file.num_bytes)
            os.fsync(stream.fileno())


def _take_room(descriptor: int, num_bytes: int) -> None:
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    os.ftruncate(descriptor, num_bytes)


class PlacedWriter:
    """Writes into the files of a folder that `make_files` has made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> PlacedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def write(
        self,
        name: str,
        place: Place,
        shape: Sequence[int],
        offsets: Sequence[int],
        data: torch.Tensor,
    ) -> None:
        """Write a box of a tensor.

        Args:
            shape: of the whole tensor.
            offsets: of the box in it.
            data: the elements of the box, of any dtype, on any device.

        Raises:
            CheckpointWriteError: naming file and tensor.
        """
        path = self._folder / place.file
        with write_errors(path, f"tensor {name!r}"):
            if place.file not in self._descriptors:
                self._descriptors[place.file] = os.open(path, os.O_WRONLY)
            descriptor = self._descriptors[place.file]
            for first, piece in _pieces(tensors.plain(data.detach()), place.dtype.itemsize):
                here = tensors.on_host(piece.to(place.dtype))
                at = [offsets[0] + first, *offsets[1:]] if shape else []
                left, itemsize = bytes_of(here), place.dtype.itemsize
                for start, length in runs_of(shape, at, here.shape):
                    run, left = left[: length * itemsize], left[length * itemsize :]
                    _write_at(descriptor, run, place.offset + start * itemsize)

    def finish(self) -> None:
        """Bring all of it to the disk."""
        for file, descriptor in self._descriptors.items():
            with write_errors(self._folder / file, "the rest of it"):
                os.fsync(descriptor)


def _pieces(data: torch.Tensor, itemsize: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Slices along the first dimension, with the place of each."""
    if data.dim() == 0:
        yield 0, data
        return
    count = data.shape[0]
    step = max(1, count * _PIECE // max(1, data.numel() * itemsize))
    for first in range(0, count, step):
        yield first, data.narrow(0, first, min(step, count - first))


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
