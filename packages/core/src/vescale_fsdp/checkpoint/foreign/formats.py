"""Detects the format of a checkpoint that is not ours, and opens it as a `sources.Source`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vescale_fsdp.checkpoint import encoding
from vescale_fsdp.checkpoint.files import DataReader
from vescale_fsdp.checkpoint.foreign.dcp import plain_values
from vescale_fsdp.checkpoint.foreign.dcp_directory import METADATA, StockDirectory, StockNames
from vescale_fsdp.checkpoint.foreign.deepspeed import ZeroCheckpoint, folder_of
from vescale_fsdp.checkpoint.manifest import NAME, Chunk, TensorEntry
from vescale_fsdp.checkpoint.safetensors import manifest_of
from vescale_fsdp.checkpoint.safetensors_files import INDEX, SINGLE, TensorFiles
from vescale_fsdp.checkpoint.sources import Source
from vescale_fsdp.errors import CheckpointIncompleteError

_PIECE = 1 << 28  # bytes: a larger tensor in one chunk is read in several


def opened(path: Path, stack: contextlib.ExitStack) -> Source:
    """Open the checkpoint at a path. The stack closes its files."""
    if (path / METADATA).exists():
        return _Stock(path, stack)
    is_file = path.exists() and not path.is_dir()
    if is_file or any((path / name).exists() for name in (SINGLE, INDEX)):
        source: Source = _Safetensors(path, stack)
    elif (folder := folder_of(path)) is not None:
        source = ZeroCheckpoint(folder)
    else:
        raise CheckpointIncompleteError(
            f"there is no checkpoint at {path}: neither {NAME}, nor {METADATA}, nor {SINGLE} or "
            f"{INDEX}, nor one of DeepSpeed"
        )
    source.tensors = {name: _in_pieces(entry) for name, entry in source.tensors.items()}
    return source


def format_of(directory: Path, children: Sequence[Path]) -> str:
    """Return the name of a directory's format if it is a known one of others, else ""."""
    if any(child.name == METADATA for child in children):
        return "a directory of torch.distributed.checkpoint"
    if any(child.suffix == ".safetensors" for child in children):
        return "safetensors"
    return "" if folder_of(directory) is None else "a checkpoint of DeepSpeed"


class _Stock:
    format = "dcp"

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self._directory = StockDirectory(path)
        self._reader = stack.enter_context(DataReader(path, self._directory.files, advice=""))
        names = StockNames(self._directory, self._reader)
        self.tensors = names.tensors
        extra = plain_values(self._directory, self._reader, names.others)
        step = extra.get("step")
        self.step = step if type(step) is int else None
        self.texts = {**names.texts, "extra": encoding.encode(extra, "extra")[0]}

    def read(self, name: str, chunk: Chunk) -> torch.Tensor:
        dtype = self.tensors[name].dtype
        return self._directory.chunk(self._reader, dtype, chunk, f"tensor {name!r}")


class _Safetensors:
    format = "safetensors"

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self._files = TensorFiles(path)
        stack.enter_context(self._files.reader)
        manifest, self._origin = manifest_of(self._files)
        self.step: int | None = None
        self.tensors = manifest.tensors
        model = {name.removeprefix("model."): {"$tensor": name} for name in self.tensors}
        self.texts: dict[str, dict[str, Any]] = {"model": model, "extra": {}}

    def read(self, name: str, chunk: Chunk) -> torch.Tensor:
        return self._files.box(self._origin[name], chunk.offsets, chunk.sizes)


def _in_pieces(entry: TensorEntry) -> TensorEntry:
    """Split the only chunk of a tensor into chunks of whole rows, to need less memory."""
    chunk = entry.chunks[0]
    if chunk.span.length <= _PIECE or not entry.shape:
        return entry
    row = chunk.span.length // entry.shape[0]
    step = max(1, _PIECE // row)
    chunks = []
    for first in range(0, entry.shape[0], step):
        count = min(step, entry.shape[0] - first)
        span = replace(chunk.span, offset=chunk.span.offset + first * row, length=count * row)
        chunks.append(Chunk((first, *chunk.offsets[1:]), (count, *entry.shape[1:]), span))
    return replace(entry, chunks=tuple(chunks))
