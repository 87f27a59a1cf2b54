"""Writing what `directory` reads: the data files and the metadata of a DCP directory.

Items are written one after the other, as ``torch.save`` writes them, so that memory is needed for
one of them. The metadata are pickled: they are made of our own names and numbers.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from vescale_fsdp.checkpoint.dcp.directory import METADATA
from vescale_fsdp.checkpoint.disk.files import DataWriter, write_file
from vescale_fsdp.checkpoint.disk.manifest import DTYPES, Span, TensorEntry
from vescale_fsdp.checkpoint.state import tensors


class StockWriter:
    """The data file of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._writer = DataWriter(folder, f"__{rank}_0.distcp")

    def write(self, value: Any, label: str) -> Span:
        """Append a tensor or a plain value. Returns where it lies.

        Raises:
            CheckpointWriteError: naming the file and the item.
        """
        if isinstance(value, torch.Tensor):
            value = tensors.on_host(value)
            if value.untyped_storage().nbytes() != value.numel() * value.element_size():
                value = value.clone()  # torch.save writes all of a storage
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return self._writer.write(buffer.getbuffer(), label)

    def finish(self) -> None:
        """Bring all of it to the disk."""
        self._writer.finish()

    def abandon(self) -> None:
        """Close the file after an error."""
        self._writer.abandon()


def write_metadata(
    folder: Path,
    entries: Mapping[str, TensorEntry],
    values: Mapping[str, Span],
    paths: Mapping[str, tuple[str | int, ...]],
) -> None:
    """Write the file that makes a directory loadable.

    Args:
        entries: tensors by key, with the spans that `StockWriter` gave.
        values: the other items by key.
        paths: what the keys were joined from.

    Raises:
        CheckpointWriteError: it cannot be written.
    """
    found: dict[str, STORAGE_TYPES] = {}
    places: dict[MetadataIndex, Any] = {}
    for key, entry in entries.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for chunk in entry.chunks
        ]
        properties = TensorProperties(dtype=DTYPES[entry.dtype])
        found[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for chunk in entry.chunks:
            places[MetadataIndex(key, chunk.offsets)] = _info(chunk.span)
    for key, span in values.items():
        found[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _info(span)
    known = Metadata(found, dict(paths), places, StorageMeta())
    if hasattr(filesystem, "CURRENT_DCP_VERSION"):
        known.version = filesystem.CURRENT_DCP_VERSION
    write_file(folder / METADATA, pickle.dumps(known))


def _info(span: Span) -> Any:
    return filesystem._StorageInfo(span.file, span.offset, span.length)
