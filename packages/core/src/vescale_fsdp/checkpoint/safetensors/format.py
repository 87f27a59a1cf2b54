"""The safetensors format, and how a model lies in several files of it.

A file is the length of its header in 8 bytes, little-endian, the header, which is JSON, and the
tensors, row-major, one after the other without gaps::

    {"__metadata__": {"format": "pt"},
     "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}      <- from the data's start

Headers are padded with spaces to 8 bytes, and tensors with larger elements come first, so that each
is aligned. A directory has ``model.safetensors``, or parts and an index that names the file of each
tensor::

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json        {"metadata": {"total_size": ...}, "weight_map": {...}}

What is read may come from anywhere: it is believed only if it fits. Pure Python; no data are read.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from vescale_fsdp.checkpoint.disk import jsons
from vescale_fsdp.checkpoint.disk.geometry import spans_fault
from vescale_fsdp.checkpoint.disk.regular import open_regular, read_regular
from vescale_fsdp.errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointValueError,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors package, here of an index too
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
    """A tensor in a file: ``offset`` is that of its first byte from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class File:
    """A file: its first bytes, which say what is in it, and the tensors."""

    name: str
    head: bytes
    num_bytes: int
    entries: dict[str, Entry]
    metadata: dict[str, str]


# Out


def lay_out(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    max_file_bytes: int,
    metadata: Mapping[str, str],
) -> list[File]:
    """Divide tensors among files, in their order, and each file among its tensors.

    Args:
        tensors: dtypes and shapes by name.
        max_file_bytes: of the tensors in one file; a larger tensor has a file of its own.
        metadata: of each file.

    Raises:
        CheckpointValueError: a dtype that safetensors has not, by name.
    """
    parts: list[dict[str, tuple[torch.dtype, Sequence[int]]]] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _NAMES:
            raise CheckpointValueError(
                f"{name!r} has the dtype {dtype}, which safetensors has not: convert it first"
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
    name: str,
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str],
) -> File:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=lambda key: -tensors[key][0].itemsize):
        dtype, shape = tensors[key]
        starts[key], end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [starts[key], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    entries = {
        key: Entry(tensors[key][0], tuple(tensors[key][1]), len(head) + start)
        for key, start in starts.items()
    }
    return File(name, head, len(head) + end, entries, dict(metadata))


def index_of(files: Sequence[File]) -> bytes:
    """The text of the index of several files."""
    total = sum(entry.num_bytes for file in files for entry in file.entries.values())
    weights = {name: file.name for file in files for name in file.entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def is_weights(name: str) -> bool:
    """Whether a file of this name has, or lists, weights that are read by default."""
    is_part = name.startswith("model-") and name.endswith(".safetensors")
    return name in (SINGLE, INDEX) or is_part


# In


def read_files(path: Path) -> tuple[Path, list[File]]:
    """The headers of a file, or of those in a directory. Returns their folder and the files.

    Args:
        path: of a file, of an index, or of a directory with ``model.safetensors`` or an index.

    Raises:
        CheckpointIncompleteError: there is no such file, or one that the index names is missing.
        CheckpointCorruptError: a header or the index is not what the format allows.
    """
    if path.is_dir():
        found = [path / name for name in (SINGLE, INDEX) if (path / name).exists()]
        if not found:
            raise CheckpointIncompleteError(
                f"there is neither {SINGLE} nor {INDEX} in {path}; give the path of a file if it "
                "has another name"
            )
        path = found[0]
    if path.suffix != ".json":
        return path.parent, [_read_header(path)]
    names = _read_index(path)
    files = [_read_header(path.parent / name) for name in sorted(set(names.values()))]
    held: dict[str, str] = {}
    for file in files:
        for name in file.entries:
            if name in held:
                raise CheckpointCorruptError(
                    f"{name!r} is in {held[name]} and in {file.name} of {path.parent}"
                )
            held[name] = file.name
    for name in sorted({*names, *held}):
        if names.get(name) != held.get(name):
            place = f"is in {held[name]}" if name in held else "is in none of its files"
            raise CheckpointCorruptError(
                f"{path} says that {name!r} is in {names.get(name, 'no file')}, but it {place}"
            )
    return path.parent, files


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = jsons.load(read_regular(path, _LARGEST_HEADER))
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


def _read_header(path: Path) -> File:
    try:
        with open_regular(path) as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            first = stream.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else num_bytes
            if length > min(_LARGEST_HEADER, num_bytes - 8):
                _refuse(path, f"its header should have {length} bytes, the file has {num_bytes}")
            head = first + stream.read(length)
    except FileNotFoundError as error:
        raise CheckpointIncompleteError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointIncompleteError(f"{path} cannot be read: {error}") from error
    try:
        header = jsons.load(head[8:].decode())
    except ValueError as error:
        _refuse(path, f"its header is no JSON: {error}")
    if not isinstance(header, dict):
        _refuse(path, "its header is no object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse(path, "its metadata are no texts")
    entries = {name: _entry(path, name, fields, len(head)) for name, fields in header.items()}
    spans = [(each.offset - len(head), each.num_bytes, repr(n)) for n, each in entries.items()]
    fault = spans_fault(num_bytes - len(head), spans)
    if fault:
        _refuse(path, f"in its data {fault}")
    return File(path.name, head, num_bytes, entries, metadata)


def _entry(path: Path, name: str, fields: Any, start: int) -> Entry:
    if not isinstance(fields, dict) or sorted(fields) != ["data_offsets", "dtype", "shape"]:
        _refuse(path, f"{name!r} has not dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        _refuse(path, f"{name!r} has the unknown dtype {dtype!r}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        counts = isinstance(numbers, list) and len(numbers) <= 64
        if not counts or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
            _refuse(path, f"{name!r} has the {what} {numbers!r}")
    if len(offsets) != 2:
        _refuse(path, f"{name!r} has the data_offsets {offsets!r}")
    entry = Entry(_DTYPES[dtype], tuple(shape), start + offsets[0])
    if entry.num_bytes != offsets[1] - offsets[0]:
        _refuse(
            path,
            f"{name!r} of {dtype} {shape} has {offsets[1] - offsets[0]} bytes, expected "
            f"{entry.num_bytes}",
        )
    return entry


def _refuse(path: Path, what: str) -> NoReturn:
    raise CheckpointCorruptError(
        f"{path} is refused: {what}. It was damaged, cut, or is no safetensors file"
    )
