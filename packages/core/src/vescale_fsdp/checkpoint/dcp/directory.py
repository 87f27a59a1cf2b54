"""Directories of torch.distributed.checkpoint (DCP), read without running anything of theirs.

Their ``.metadata`` is a pickle, and so is each item: what `load` never reads. Here they are read by
unpicklers that build the classes of that format, and call nothing else. What the metadata claim is
believed only if it fits: names of files in the directory, ranges within them, boxes that tile their
tensor. The bytes have no checksums: what was damaged is read as it is.

Keys are paths joined by dots, ``model.layers.0.weight``, ``optimizer.state.layers.0.weight.step``,
``optimizer.param_groups.0.lr``. Where in them the model and the optimizers are is up to who saved::

    model.<fqn>      optimizer.state...    the usual, and what `export_dcp` writes
    app.model.<fqn>  app.optim.state...    objects with state_dict(), as in PyTorch's tutorials
    <fqn>            optimizer.state...    torchtitan
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from vescale_fsdp.checkpoint.disk.files import DataReader, bytes_of
from vescale_fsdp.checkpoint.disk.geometry import boxes_fault
from vescale_fsdp.checkpoint.disk.manifest import DTYPES, Chunk, Span, TensorEntry
from vescale_fsdp.checkpoint.disk.regular import read_regular, size_of
from vescale_fsdp.checkpoint.state import values
from vescale_fsdp.checkpoint.state.tensors import dtype_name
from vescale_fsdp.errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointValueError,
)

METADATA = ".metadata"
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class StockDirectory:
    """What is in a directory, by DCP's keys.

    Attributes:
        tensors: their chunks; a span is that of a pickled tensor, without a CRC32.
        values: where the other items are.
        paths: what a key was joined from.
        files: the sizes of the data files.
        digest: of the metadata.

    Raises:
        CheckpointIncompleteError: there is no such directory, or a file is missing.
        CheckpointCorruptError: the metadata are not those of this format, or do not fit.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / METADATA
        self.tensors: dict[str, TensorEntry] = {}
        self.values: dict[str, Span] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.files: dict[str, int] = {}
        try:
            data = read_regular(self._file, sys.maxsize, pickle.PROTO)
        except OSError as error:
            raise CheckpointIncompleteError(
                f"there is no checkpoint of torch.distributed.checkpoint at {folder}"
            ) from error
        self.digest = hashlib.sha256(data).hexdigest()
        found = self._unpickled(data)
        try:
            self._take(found)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(
                f"{self._file} is refused: it has not the form of this format ({error})"
            ) from error

    def _unpickled(self, data: bytes) -> Metadata:
        try:
            found = MetadataUnpickler(io.BytesIO(data)).load()
        except _RefusedError as error:
            raise CheckpointCorruptError(
                f"{self._file} is refused: it wants {error}, which is no part of this format and "
                "could run code"
            ) from error
        except Exception as error:  # whatever damaged bytes make it raise
            raise CheckpointCorruptError(f"{self._file} cannot be read: {error!r}") from error
        if type(found) is not Metadata:
            raise CheckpointCorruptError(
                f"{self._file} holds a {type(found).__name__}, no metadata"
            )
        return found

    def _take(self, found: Metadata) -> None:
        storage: Any = found.storage_data
        paths: Any = found.planner_data or {}
        for key, each in found.state_dict_metadata.items():
            if type(key) is not str:
                raise ValueError(f"the key {key!r} is no text")
            path = tuple(paths.get(key, (key,))) if isinstance(paths, dict) else (key,)
            if any(type(part) not in (str, int) for part in path):
                raise ValueError(f"{key!r} has the path {path!r}")
            self.paths[key] = path
            if isinstance(each, BytesStorageMetadata):
                self.values[key] = self._span(storage[MetadataIndex(key)], key)
            elif isinstance(each, TensorStorageMetadata):
                self.tensors[key] = self._tensor(key, each, storage)
            else:
                raise ValueError(f"{key!r} is a {type(each).__name__}")

    def _tensor(self, key: str, each: TensorStorageMetadata, storage: Any) -> TensorEntry:
        dtype = dtype_name(each.properties.dtype)
        if dtype not in DTYPES:
            raise ValueError(f"{key!r} has the dtype {dtype}")
        shape = _counts(each.size)
        chunks = []
        for chunk in each.chunks:
            offsets, sizes = _counts(chunk.offsets), _counts(chunk.sizes)
            span = self._span(storage[MetadataIndex(key, offsets)], key)
            chunks.append(Chunk(offsets, sizes, span))
        fault = boxes_fault(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
        if fault:
            raise ValueError(f"{key!r} of shape {list(shape)} is not whole: {fault}")
        return TensorEntry(dtype, shape, tuple(chunks))

    def _span(self, info: Any, key: str) -> Span:
        file, (offset, length) = info.relative_path, _counts((info.offset, info.length))
        if type(file) is not str or not _FILE.fullmatch(file):
            raise ValueError(f"{file!r} of {key!r} is not the name of a file in this directory")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{key!r} is compressed or encrypted, which is not read here")
        if file not in self.files:
            try:
                self.files[file] = size_of(self.folder / file, repr(key))
            except OSError as error:
                raise CheckpointIncompleteError(
                    f"{self.folder / file} is missing, with {key!r} in it"
                ) from error
        if offset + length > self.files[file]:
            raise CheckpointCorruptError(
                f"{self.folder / file} has {self.files[file]} bytes, but {key!r} should end at "
                f"byte {offset + length}: it was cut, or is of another checkpoint"
            )
        return Span(file, offset, length, 0)

    # Items

    def chunk(self, reader: DataReader, dtype: str, chunk: Chunk, label: str) -> torch.Tensor:
        """The elements of a chunk.

        Raises:
            CheckpointCorruptError: it is no tensor, or another one than the metadata say.
        """
        found = self._loaded(reader, chunk.span, label)
        if (
            not isinstance(found, torch.Tensor)
            or found.layout is not torch.strided
            or (dtype_name(found.dtype), tuple(found.shape)) != (dtype, chunk.sizes)
        ):
            what = (
                f"{found.dtype} {tuple(found.shape)}"
                if isinstance(found, torch.Tensor)
                else type(found).__name__
            )
            raise CheckpointCorruptError(
                f"{self.folder / chunk.span.file} has a {what} for {label}, expected {dtype} "
                f"{chunk.sizes}"
            )
        return found.detach().contiguous()

    def value(self, reader: DataReader, key: str) -> values.Json:
        """The JSON of an item that is no tensor, as `values.encode` makes it.

        Raises:
            CheckpointCorruptError: it is more than plain data.
        """
        found = self._loaded(reader, self.values[key], f"value {key!r}")
        try:
            encoded, tensors = values.encode(found, key)
        except CheckpointValueError as error:
            raise CheckpointCorruptError(
                f"{self.folder / self.values[key].file} is refused: {error}"
            ) from error
        if tensors:
            raise CheckpointCorruptError(
                f"{self.folder / self.values[key].file} is refused: {key!r} has tensors within a "
                "pickled value"
            )
        return encoded

    def _loaded(self, reader: DataReader, span: Span, label: str) -> Any:
        data = reader.read_part(span, 0, span.length, label)
        try:
            return torch.load(io.BytesIO(bytes_of(data)), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointCorruptError(
                f"{self.folder / span.file} is refused in {label}: it holds more than plain data, "
                "and could run code, or is damaged"
            ) from error
        except Exception as error:  # whatever damaged bytes make it raise
            raise CheckpointCorruptError(
                f"{self.folder / span.file} cannot be read in {label}: {error!r}"
            ) from error


def _counts(numbers: Any) -> tuple[int, ...]:
    found = tuple(numbers)
    if len(found) > 64 or any(type(n) is not int or not 0 <= n < 2**63 for n in found):
        raise ValueError(f"{found!r} are no counts")
    return found


class _RefusedError(pickle.UnpicklingError):
    """A name that is no part of the format."""


class MetadataUnpickler(pickle.Unpickler):
    """Builds what DCP's metadata are made of, and refuses every other name."""

    _dtypes = frozenset(n for n, v in vars(torch).items() if isinstance(v, torch.dtype))
    _classes = frozenset(
        (each.__module__, each.__qualname__)
        for module in (metadata, filesystem)
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == module.__name__
        if module is metadata or each.__qualname__ == "_StorageInfo"
    )
    _others = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "Path"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "Path"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """Called for every name in the pickle."""
        is_dtype = module == "torch" and name in self._dtypes
        if is_dtype or (module, name) in self._classes or (module, name) in self._others:
            return super().find_class(module, name)
        raise _RefusedError(f"{module}.{name}")
