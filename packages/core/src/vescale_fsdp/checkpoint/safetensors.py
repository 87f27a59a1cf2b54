"""save_safetensors and load_safetensors: sharded models in the files that ``transformers`` uses.

Nothing is gathered. The shapes determine the position of each element in the files, and each rank
writes its own elements there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from vescale_fsdp.checkpoint import encoding
from vescale_fsdp.checkpoint.contents import Contents
from vescale_fsdp.checkpoint.files import write_file
from vescale_fsdp.checkpoint.loading import Boxes, Change, arrivals
from vescale_fsdp.checkpoint.manifest import DTYPES, Chunk, Manifest, Seal, Span, TensorEntry
from vescale_fsdp.checkpoint.safetensors_files import (
    INDEX,
    Entry,
    File,
    PlacedWriter,
    TensorFiles,
    index_of,
    is_weights,
    lay_out,
    make_files,
)
from vescale_fsdp.checkpoint.saving import Writing, begin_load, publish_files
from vescale_fsdp.checkpoint.targets import ModelTarget, Saved
from vescale_fsdp.errors import (
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
    CheckpointWriteError,
)
from vescale_fsdp.ranks import everyone

MAX_FILE_BYTES = 5 * 10**9


def save_safetensors(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model as safetensors in the layout of ``transformers``. Collective.

    Writes ``model.safetensors``, or parts of at most ``max_file_bytes`` with an index, by the names
    of the model's state dict. Tied parameters are written under their first name; each file's
    metadata name the others, as ``safetensors.torch.save_model`` does.

    Args:
        directory: the target. It may exist (with ``config.json``, a tokenizer), but must not
            contain weights. The same on every rank, on a file system that all of them share.
        model: sharded or not.
        max_file_bytes: limit for the tensors in one file; a larger tensor has its own file.
        dtype: convert floating-point tensors to it; by default dtypes do not change.
        metadata: strings for each file, beside ``{"format": "pt"}``.

    Cost: each rank writes its elements, replicas once; three small messages per rank; 32 MiB of
    host memory. A new directory appears when all of it is on the disk; in an existing one the
    files appear one after the other, the index last.

    Raises:
        CheckpointExistsError: there are weights in the directory. Nothing is ever overwritten.
        CheckpointValueError: the model has a state that is not a tensor, or of a dtype or name that
            the format does not support; or metadata are not texts. It names them.
        CheckpointMismatchError: ranks hold different models.
        RankMismatchError: ranks have different arguments.
        CheckpointWriteError: disk full, no permission, no folder that all ranks share.
        RankMismatchError: another rank has died.

    After an error there are no new files.
    """
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes is {max_file_bytes}, expected at least 1")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}, expected one of floating point")
    target, ties = Path(directory).absolute(), encoding.ties_of(model)
    texts = {"format": "pt", **ties, **(metadata or {})}
    writing = Writing(target, f"the export to {target}", into=True)
    files: list[File] = []  # on rank 0
    names: list[str] = []  # in the order of the state dict

    def collect() -> Contents:
        _check_texts(metadata or {})
        contents = _contents(model, ties)
        names.extend(contents.planned)
        return contents

    def begin(stage: Path, offers: list[Any]) -> list[Any]:
        check_no_weights(target)
        shapes = {
            name: (_dtype_in_file(DTYPES[held], dtype), tuple(shape))
            for offer in offers
            for name, _, _, held, shape, _ in offer["boxes"]
        }
        order = [*(name for name in names if name in shapes), *sorted(shapes.keys() - names)]
        files.extend(lay_out({n: shapes[n] for n in order}, max_file_bytes, texts))
        make_files(stage, files)
        places = {name: entry for file in files for name, entry in file.entries.items()}
        return [
            {box[0]: [places[box[0]].file, places[box[0]].offset] for box in mine}
            for mine in (offer["boxes"] for offer in offers)
        ]

    def write() -> None:
        with PlacedWriter(writing.folder) as writer:
            for piece in writing.ranks.going_on(writing.local.chosen(writing.task)):
                file, offset = writing.task["told"][piece.name]
                held = _dtype_in_file(piece.data.dtype, dtype)
                place = Entry(file, held, piece.shape, offset)
                writer.write(piece.name, place, piece.offsets, piece.data)
            writer.finish()

    writing.plan(collect, begin, [max_file_bytes, str(dtype), texts])
    writing.write(write, lambda stage, _: publish_files(stage, finish_files(stage.path, files)))


def _contents(model: nn.Module, ties: Mapping[str, str]) -> Contents:
    """Return the model's tensors, tied ones once."""
    contents = Contents()
    state = get_model_state_dict(model)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointValueError(
                f"{name!r} is a {type(value).__name__}, and safetensors holds only tensors. "
                "Remove it from the state dict, or use checkpoint.save"
            )
        if ties.get(name) in state:
            continue
        encoding.check(value, name)
        contents.planned[name] = value
    contents.mark_buffers(model)
    return contents


def _check_texts(metadata: Mapping[str, str]) -> None:
    """Raise unless readers of the format accept the metadata."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise CheckpointValueError(
                f"metadata has {key!r}: {value!r}, and safetensors keeps texts only: pass "
                f"{str(key)!r}: {str(value)!r}"
            )


def _dtype_in_file(held: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype in the file. Ints, bools and 8-bit floats are never converted."""
    return wanted if wanted is not None and encoding.is_float(held) else held


def check_no_weights(directory: Path) -> None:
    """Raise if the directory already contains weights."""
    if not directory.is_dir():
        return
    there = sorted(each.name for each in directory.iterdir() if is_weights(each.name))
    if there:
        raise CheckpointExistsError(
            f"{directory / there[0]} exists already, and is never overwritten; write to another "
            "directory, or delete it first"
        )


def finish_files(stage: Path, files: Sequence[File]) -> list[str]:
    """Check the written files, and write the index. Returns all names, the index last."""
    for file in files:
        found = (stage / file.name).stat().st_size
        if found != file.num_bytes:
            raise CheckpointWriteError(
                f"{stage / file.name} has {found} bytes, expected {file.num_bytes}: does another "
                "process write there?"
            )
    names = [file.name for file in files]
    if len(files) == 1:
        return names
    write_file(stage / INDEX, index_of(files))
    return [*names, INDEX]


Rename = Callable[[str], str | None] | Mapping[str, str | None]


class LoadedNames(NamedTuple):
    """Names that did not match. Both lists are empty after a strict load."""

    missing: list[str]  # names of the model that no file has: left as they were
    unexpected: list[str]  # names in the files that the model does not have


def load_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    rename: Rename | None = None,
) -> LoadedNames:
    """Load a model's tensors from safetensors, in place. Collective.

    Floating-point tensors are cast to the dtypes of the model (for example from bf16 to fp32);
    others, and floats of 8 bits, must have the same dtype. Of tied parameters one name is enough.
    States of the model that are not tensors do not change.

    Args:
        path: a file, an index, or a directory with ``model.safetensors`` or an index.
        model: sharded or not. For a model on the meta device: shard it, call
            ``to_empty(device=...)``, then fill the buffers that are not saved.
        strict: refuse files that lack names of the model, or have others, and a model with tensors
            that have no values after ``to_empty`` and get none.
        rename: maps a name in the files to the model's name: a function, or a mapping, which keeps
            names that it does not contain. The result None skips that tensor.

    Returns:
        Names that did not match.

    Cost: each rank reads all headers, and the bytes of its own elements, once; host memory
    for these, or for one tensor if the model has no values yet; two small messages per rank. The
    format has no checksums.

    Raises:
        CheckpointIncompleteError: there are no such files, or names are missing.
        RankMismatchError: another rank has died.
        CheckpointMismatchError: a name is unexpected, or has another shape or kind of dtype.
        CheckpointCorruptError: a file or the index violates the format, or cannot be
            read.

    After an error nothing has changed on any rank.
    """
    begin_load()
    ranks = everyone()
    change = Change(ranks, f"the load of {path}")
    names = LoadedNames([], [])

    def prepare() -> Any:
        files = TensorFiles(Path(path))
        manifest, origin = manifest_of(files, rename)
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

        def boxes(name: str, _: Chunk) -> Boxes:
            return lambda offsets, lengths: files.box(origin[name], offsets, lengths)

        with files.reader:
            change.take(arrivals(manifest, change.wanted, boxes))
        return files.identity()

    change.carry_out(prepare)
    return names


def _check_names(names: LoadedNames, path: str | os.PathLike[str]) -> None:
    faults = []
    if names.missing:
        faults.append(f"it lacks {_shown(names.missing)}")
    if names.unexpected:
        faults.append(f"it has {_shown(names.unexpected)}, which the model does not have")
    if faults:
        kind = CheckpointIncompleteError if names.missing else CheckpointMismatchError
        raise kind(
            f"{path} belongs to another model: {', and '.join(faults)}. Pass rename= to map or "
            "drop names, or strict=False"
        )


def _shown(names: list[str]) -> str:
    return f"{len(names)} names ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def _check_dtype(
    name: str, entry: TensorEntry, tensor: torch.Tensor, path: str | os.PathLike[str]
) -> None:
    found = DTYPES[entry.dtype]
    if found != tensor.dtype and not (encoding.is_float(found) and encoding.is_float(tensor.dtype)):
        raise CheckpointMismatchError(
            f"{name!r} is {entry.dtype} in {path}, and {encoding.dtype_name(tensor.dtype)} here; "
            "only floats of 16 bits and more are converted"
        )


def manifest_of(
    files: TensorFiles, rename: Rename | None = None
) -> tuple[Manifest, dict[str, str]]:
    """Return a manifest of the files, and the name in the files for each name in the manifest.

    Each tensor is one chunk. The CRC32s are 0, because the format has none.
    """
    entries: dict[str, TensorEntry] = {}
    origin: dict[str, str] = {}
    for name, entry in files.entries.items():
        new = _renamed(name, rename)
        if new is None:
            continue
        if f"model.{new}" in origin:
            raise CheckpointMismatchError(
                f"rename gives the name {new!r} to both {origin[f'model.{new}']!r} and {name!r}"
            )
        origin[f"model.{new}"] = name
        span = Span(entry.file, entry.offset, entry.num_bytes, 0)
        chunk = Chunk((0,) * len(entry.shape), entry.shape, span)
        dtype = encoding.dtype_name(entry.dtype)
        entries[f"model.{new}"] = TensorEntry(dtype, entry.shape, (chunk,))
    return Manifest(Seal("", 0, None, ""), 1, {}, {}, entries, {}), origin


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    return rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
