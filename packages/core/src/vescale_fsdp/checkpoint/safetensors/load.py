"""load_safetensors: consolidated files straight into shards.

Each rank reads the headers, and then the bytes of its own elements only. See `change` for the rest:
nothing is touched before all ranks have read what they need.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from vescale_fsdp.checkpoint.disk.files import DataReader, bytes_of
from vescale_fsdp.checkpoint.disk.geometry import runs_of
from vescale_fsdp.checkpoint.disk.manifest import DTYPES, Chunk, Manifest, Seal, Span, TensorEntry
from vescale_fsdp.checkpoint.safetensors.format import File, read_files
from vescale_fsdp.checkpoint.sealed.save import finish_saves
from vescale_fsdp.checkpoint.state import tensors
from vescale_fsdp.checkpoint.state.targets import ModelTarget, Saved
from vescale_fsdp.checkpoint.transfer.change import Change
from vescale_fsdp.checkpoint.transfer.ranks import all_ranks
from vescale_fsdp.checkpoint.transfer.reading import Arrival, Part, parts_of
from vescale_fsdp.errors import CheckpointIncompleteError, CheckpointMismatchError

Rename = Callable[[str], str | None] | Mapping[str, str | None]


class LoadedNames(NamedTuple):
    """What did not match. Both are empty after a strict load."""

    missing: list[str]  # names of the model that no file has: left as they were
    unexpected: list[str]  # names in the files that the model has not


def load_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    rename: Rename | None = None,
) -> LoadedNames:
    """Load a model's tensors from safetensors, in place. Collective.

    Tensors of floating point are cast to the dtypes that the model has (from bf16 to fp32 masters);
    others, and floats of 8 bits, must have the same dtype. Of tied parameters one name is enough.
    States of the model that are no tensors are left alone.

    Args:
        path: a file, an index, or a directory with ``model.safetensors`` or an index.
        model: sharded or not. One that was made on the meta device: shard it, then
            ``to_empty(device=...)``, then fill the buffers that are not saved.
        strict: refuse files that lack names of the model, or have others, and a model in which
            something has no values after ``to_empty`` and gets none.
        rename: the model's name for a name in the files: a function or a mapping, which keeps names
            that it has not. None as a result: leave that tensor out.

    Returns:
        What did not match.

    Cost: each rank reads all headers, and the bytes of its own elements, once; memory in the host
    for these, or for one tensor where the model has no values yet; two small messages per rank. The
    format has no checksums.

    Raises:
        CheckpointIncompleteError: there are no such files, names are missing, or another rank has
            died.
        CheckpointMismatchError: a name is unexpected, or has another shape or kind of dtype.
        CheckpointCorruptError: a file or the index is not what the format allows, or cannot be
            read.

    After an error nothing has changed, on any rank.
    """
    check_last = finish_saves()
    ranks = all_ranks()
    change = Change(ranks, f"the load of {path}")
    names = LoadedNames([], [])

    def prepare() -> str:
        check_last()
        folder, files = read_files(Path(path))
        manifest = manifest_of(files, rename)
        # Not strict: missing and unexpected names make one message.
        saved = Saved(str(path), manifest, {}, ranks.rank, strict=False)
        target = ModelTarget(model, saved, tensors_only=True)
        change.targets.append(target)
        unexpected = sorted(manifest.tensors.keys() - target.names)
        names.missing.extend(each.removeprefix("model.") for each in target.lacking)
        names.unexpected.extend(each.removeprefix("model.") for each in unexpected)
        if strict:
            _check_names(names, path)
            target.check_filled()
        for name, tensor in target.live.items():
            _check_dtype(name.removeprefix("model."), manifest.tensors[name], tensor, path)
        with DataReader(folder, manifest.files, advice="; nothing was loaded") as reader:
            change.take(_arrivals(reader, manifest, change.wanted))
        return hashlib.sha256(b"".join(file.head for file in files)).hexdigest()

    change.carry_out(prepare)
    return names


def _check_names(names: LoadedNames, path: str | os.PathLike[str]) -> None:
    faults = []
    if names.missing:
        faults.append(f"it lacks {_shown(names.missing)}")
    if names.unexpected:
        faults.append(f"it has {_shown(names.unexpected)}, which the model has not")
    if faults:
        kind = CheckpointIncompleteError if names.missing else CheckpointMismatchError
        raise kind(
            f"{path} is of another model: {', and '.join(faults)}. Pass rename= to map or drop "
            "names, or strict=False"
        )


def _shown(names: list[str]) -> str:
    return f"{len(names)} names ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def _check_dtype(
    name: str, entry: TensorEntry, tensor: torch.Tensor, path: str | os.PathLike[str]
) -> None:
    found = DTYPES[entry.dtype]
    if found != tensor.dtype and not (tensors.is_float(found) and tensors.is_float(tensor.dtype)):
        raise CheckpointMismatchError(
            f"{name!r} is {entry.dtype} in {path}, and {tensors.dtype_name(tensor.dtype)} here; "
            "only floats of 16 bits and more are converted"
        )


def manifest_of(files: list[File], rename: Rename | None = None) -> Manifest:
    """What is in the files, each tensor one chunk. There are no checksums: the CRC32s are 0.

    Raises:
        CheckpointMismatchError: two tensors get the same name.
    """
    entries: dict[str, TensorEntry] = {}
    origin: dict[str, str] = {}
    for file in files:
        for name, entry in file.entries.items():
            new = _renamed(name, rename)
            if new is None:
                continue
            if new in origin:
                raise CheckpointMismatchError(
                    f"rename gives the name {new!r} to both {origin[new]!r} and {name!r}"
                )
            origin[new] = name
            span = Span(file.name, entry.offset, entry.num_bytes, 0)
            chunk = Chunk((0,) * len(entry.shape), entry.shape, span)
            dtype = tensors.dtype_name(entry.dtype)
            entries[f"model.{new}"] = TensorEntry(dtype, entry.shape, (chunk,))
    sizes = {file.name: file.num_bytes for file in files}
    return Manifest(Seal("", 0, None, ""), 1, {}, sizes, entries, {})


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    return rename.get(name, name) if isinstance(rename, Mapping) else rename(name)


def _arrivals(
    reader: DataReader, manifest: Manifest, wanted: Mapping[str, torch.Tensor]
) -> Iterator[Arrival]:
    parts = parts_of(manifest, wanted)
    for span in sorted(parts, key=lambda span: (span.file, span.offset)):
        for part in parts[span]:
            yield Arrival(part.name, part.place, _read(reader, part, manifest.tensors[part.name]))


def _read(reader: DataReader, part: Part, entry: TensorEntry) -> torch.Tensor:
    """The elements of a box, and nothing beside them."""
    dtype, span, label = DTYPES[entry.dtype], part.chunk.span, f"tensor {part.name!r}"
    value = torch.empty(part.lengths, dtype=dtype)
    left = bytes_of(value)
    for start, length in runs_of(entry.shape, part.offsets, part.lengths):
        run, left = left[: length * dtype.itemsize], left[length * dtype.itemsize :]
        reader.read_into(run, span, start * dtype.itemsize, label)
    return value
