"""Writes and reads boxes of tensors in safetensors files.

A file contains the length of its header (8 bytes, little-endian), the header (JSON) and the tensors
(row-major, one after the other, without gaps)::

    {"__metadata__": {"format": "pt"},
     "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}      <- from the data's start

Headers are padded with spaces to 8 bytes, and tensors with larger elements come first, so that each
is aligned. A directory has ``model.safetensors``, or parts and an index that names the file of each
tensor::

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json        {"metadata": {"total_size": ...}, "weight_map": {...}}

The ``safetensors`` package reads and checks the headers. It writes whole tensors only, so the
layout is computed here: each rank knows the position of its elements, and nothing is gathered. A
flat range of elements is one run of bytes; a box of columns is one run per row. Elements are also
read here: the package maps files into memory, and then a disk error ends the process with a signal.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vescale_fsdp.checkpoint import encoding
from vescale_fsdp.checkpoint.files import (
    DataReader,
    bytes_of,
    open_regular,
    read_regular,
    write_errors,
)
from vescale_fsdp.checkpoint.manifest import Span, from_json
from vescale_fsdp.errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointValueError,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_METADATA = "__metadata__"
_LONGEST_INDEX = 100_000_000  # bytes; the package's limit for a header
_PIECE = 1 << 25  # bytes that are converted and moved to the host at once
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file. ``offset`` counts bytes from the start of the file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class File:
    """A file to write: its header as bytes, and its tensors."""

    name: str
    head: bytes
    num_bytes: int
    entries: dict[str, Entry]


# Write


def lay_out(
    held: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    max_file_bytes: int,
    metadata: Mapping[str, str],
) -> list[File]:
    """Divide tensors among files, in their order, and each file among its tensors.

    Args:
        held: dtypes and shapes by name.
        max_file_bytes: limit for the tensors in one file; a larger tensor has its own file.
        metadata: for the header of each file.
    """
    parts: list[dict[str, tuple[torch.dtype, Sequence[int]]]] = [{}]
    filled = 0
    for name, (dtype, shape) in held.items():
        if dtype not in _NAMES:
            raise CheckpointValueError(
                f"{name!r} has the dtype {dtype}, which safetensors does not support: convert it "
                "first"
            )
        if name == _METADATA:
            raise CheckpointValueError(
                f"a tensor has the name {name!r}, which safetensors has for texts: rename it"
            )
        num_bytes = math.prod(shape) * dtype.itemsize
        if parts[-1] and filled + num_bytes > max_file_bytes:
            parts.append({})
            filled = 0
        parts[-1][name] = dtype, shape
        filled += num_bytes
    count = len(parts)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = [SINGLE]
    return [_file(name, part, metadata) for name, part in zip(names, parts, strict=True)]


def _file(
    name: str, held: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> File:
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for key in sorted(held, key=lambda key: -held[key][0].itemsize):
        dtype, shape = held[key]
        starts[key], end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [starts[key], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    entries = {
        key: Entry(name, held[key][0], tuple(held[key][1]), len(head) + start)
        for key, start in starts.items()
    }
    return File(name, head, len(head) + end, entries)


def index_of(files: Sequence[File]) -> bytes:
    """Return the text of the index of several files."""
    total = sum(entry.num_bytes for file in files for entry in file.entries.values())
    weights = {name: file.name for file in files for name in file.entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def is_weights(name: str) -> bool:
    """Whether readers load weights from a file of this name by default."""
    is_part = name.startswith("model-") and name.endswith(".safetensors")
    return name in (SINGLE, INDEX) or is_part


def make_files(folder: Path, files: Sequence[File]) -> None:
    """Create files with their headers, and allocate their full size on disk."""
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
    """Writes boxes of tensors into the files that `make_files` has created."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> PlacedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def write(self, name: str, place: Entry, offsets: Sequence[int], data: torch.Tensor) -> None:
        """Write a box of a tensor.

        Args:
            offsets: of the box in the tensor.
            data: the elements of the box, of any dtype, on any device.
        """
        path, itemsize = self._folder / place.file, place.dtype.itemsize
        with write_errors(path, f"tensor {name!r}"):
            if place.file not in self._descriptors:
                self._descriptors[place.file] = os.open(path, os.O_WRONLY)
            descriptor = self._descriptors[place.file]
            for first, piece in _pieces(encoding.plain(data.detach()), itemsize):
                here = encoding.on_host(piece.to(place.dtype))
                at = [offsets[0] + first, *offsets[1:]] if place.shape else []
                left = bytes_of(here)
                for start, length in runs_of(place.shape, at, here.shape):
                    run, left = left[: length * itemsize], left[length * itemsize :]
                    _write_at(descriptor, run, place.offset + start * itemsize)

    def finish(self) -> None:
        """Flush the files to disk."""
        for file, descriptor in self._descriptors.items():
            with write_errors(self._folder / file, "the rest of it"):
                os.fsync(descriptor)


def _pieces(data: torch.Tensor, itemsize: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield slices along the first dimension, each with the index of its first element."""
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


def runs_of(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the runs (first, length) of a box's elements in a row-major tensor, in order.

    The runs are as long as possible: a box of whole rows is one run. For shape (4, 5), columns 1
    and 2 of rows 1 and 2 are (6, 2) and (11, 2).
    """
    if not math.prod(sizes):
        return
    inner = len(shape)  # dimensions from here on are whole
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    run_dim = max(inner - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(sizes[run_dim:])
    base = sum(o * stride for o, stride in zip(offsets, strides, strict=True))
    for index in product(*(range(size) for size in sizes[:run_dim])):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


# Read


class TensorFiles:
    """The tensors of one or several files. They are read in boxes.

    Args:
        path: a file, an index, or a directory with ``model.safetensors`` or an index.

    Attributes:
        entries: the tensors, by name.
        reader: reads the files. The caller closes it.
    """

    def __init__(self, path: Path) -> None:
        self.entries: dict[str, Entry] = {}
        self._sizes: dict[str, int] = {}
        if path.is_dir():
            found = [path / name for name in (SINGLE, INDEX) if (path / name).exists()]
            if not found:
                raise CheckpointIncompleteError(
                    f"there is neither {SINGLE} nor {INDEX} in {path}; give the path of a file if "
                    "it has another name"
                )
            path = found[0]
        self._folder = path.parent
        self.reader = DataReader(path.parent, self._sizes, advice="; nothing was loaded")
        names = _read_index(path) if path.suffix == ".json" else None
        for file in [path.name] if names is None else sorted(set(names.values())):
            self._read_header(file)
        for name in [] if names is None else sorted({*names, *self.entries}):
            held = self.entries[name].file if name in self.entries else None
            if names is not None and names.get(name) != held:
                place = f"is in {held}" if held else "is in none of its files"
                raise CheckpointCorruptError(
                    f"{path} says that {name!r} is in {names.get(name, 'no file')}, but it {place}"
                )

    def _read_header(self, file: str) -> None:
        path = self._folder / file
        try:
            with open_regular(path) as stream:
                self._sizes[file] = os.fstat(stream.fileno()).st_size
                head = stream.read(8)
            opened: Any = safe_open(path, framework="np")
            end = len(head) + int.from_bytes(head, "little")
            for name in opened.offset_keys():  # in file order; there are no gaps
                part = opened.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise SafetensorError(f"{name!r} has the dtype {part.get_dtype()}")
                if name in self.entries:
                    raise CheckpointCorruptError(
                        f"{name!r} is in {self.entries[name].file} and in {file} of {self._folder}"
                    )
                entry = Entry(file, _DTYPES[part.get_dtype()], tuple(part.get_shape()), end)
                self.entries[name] = entry
                end += entry.num_bytes
        except FileNotFoundError as error:
            raise CheckpointIncompleteError(f"{path} is missing") from error
        except OSError as error:
            raise CheckpointIncompleteError(f"{path} cannot be read: {error}") from error
        except SafetensorError as error:
            raise CheckpointCorruptError(
                f"{path} is refused: {error}. It is damaged, truncated, or not a safetensors file"
            ) from error

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Read the elements of a box of a tensor, and nothing else."""
        entry = self.entries[name]
        itemsize, span = entry.dtype.itemsize, Span(entry.file, entry.offset, entry.num_bytes, 0)
        value = torch.empty(tuple(sizes), dtype=entry.dtype)
        left = bytes_of(value)
        for start, length in runs_of(entry.shape, offsets, sizes):
            run, left = left[: length * itemsize], left[length * itemsize :]
            self.reader.read_into(run, span, start * itemsize, f"tensor {name!r}")
        return value

    def identity(self) -> list[Any]:
        """Return JSON that is equal on all ranks if they read the same files."""
        return [[n, e.file, str(e.dtype), list(e.shape), e.offset] for n, e in self.entries.items()]


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = from_json(read_regular(path, _LONGEST_INDEX))
    except FileNotFoundError as error:
        raise CheckpointIncompleteError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointCorruptError(f"{path} has no weight_map of names to files")
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise CheckpointCorruptError(
                f"{path} is refused: {name!r} is not the name of a safetensors file beside it"
            )
    return names
