"""export_dcp and import_dcp: the format of torch.distributed.checkpoint (DCP), which FSDP2 uses.

This file writes it; `dcp_directory` reads it. Items are written one after the other, so only one
needs memory at a time. The metadata are a pickle of names and numbers.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import nn
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

from vescale_fsdp import compat
from vescale_fsdp.checkpoint import encoding, seal
from vescale_fsdp.checkpoint.contents import Contents, Optimizers, Weights, named, weights_of
from vescale_fsdp.checkpoint.files import DataReader, DataWriter, write_file
from vescale_fsdp.checkpoint.foreign.dcp_directory import METADATA, StockDirectory, StockNames, put
from vescale_fsdp.checkpoint.loading import Boxes, Change, arrivals
from vescale_fsdp.checkpoint.manifest import DTYPES, Chunk, Manifest, Seal, Span
from vescale_fsdp.checkpoint.optimizer import NamedOptimizer
from vescale_fsdp.checkpoint.saving import Writing, begin_load, publish_files
from vescale_fsdp.checkpoint.targets import ModelTarget, Saved, optimizer_targets
from vescale_fsdp.errors import CheckpointCorruptError, CheckpointValueError
from vescale_fsdp.ranks import everyone


def write_item(writer: DataWriter, value: Any, label: str) -> Span:
    """Append a tensor or a plain value in the form of ``torch.save``. Returns its span."""
    if isinstance(value, torch.Tensor):
        value = encoding.on_host(value)
        if value.untyped_storage().nbytes() != value.numel() * value.element_size():
            value = value.clone()  # torch.save would write the whole storage of a view
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return writer.write(buffer.getbuffer(), label)


def data_file(rank: int) -> str:
    """Return the name of a rank's data file."""
    return f"__{rank}_0.distcp"


def write_metadata(folder: Path, written: Sequence[Any]) -> list[str]:
    """Write the metadata file. Returns the names of all files, the metadata last.

    Args:
        written: for each rank its boxes ``[path, dtype, shape, offsets, sizes, span]`` and its
            values ``[path, span]``. A path is the list of parts that a key is joined from.
    """
    boxes: dict[str, TensorStorageMetadata] = {}
    others: dict[str, STORAGE_TYPES] = {}
    places: dict[MetadataIndex, Span] = {}
    paths: dict[str, Any] = {}
    for part in written:
        for path, dtype, shape, offsets, sizes, span in part["boxes"]:
            key = ".".join(map(str, path))
            properties = TensorProperties(dtype=DTYPES[dtype])
            entry = TensorStorageMetadata(properties, torch.Size(shape), [])
            box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            boxes.setdefault(key, entry).chunks.append(box)
            paths[key], places[MetadataIndex(key, box.offsets)] = tuple(path), Span(*span)
        for path, span in part["values"]:
            key = ".".join(map(str, path))
            if key not in others:
                others[key] = BytesStorageMetadata()
                paths[key], places[MetadataIndex(key)] = tuple(path), Span(*span)
    files = sorted({span.file for span in places.values()})
    storage = {
        index: compat.storage_info(span.file, span.offset, span.length)
        for index, span in places.items()
    }
    known = Metadata({**boxes, **others}, paths, storage, StorageMeta())
    known.version = filesystem.CURRENT_DCP_VERSION
    write_file(folder / METADATA, pickle.dumps(known))
    return [*files, METADATA]


def export_dcp(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Mapping[str, Any] | None = None,
    model_key: str = "model",
    optimizer_key: str = "optimizer",
    weights: Weights = "all",
) -> None:
    """Write a directory in the format of ``torch.distributed.checkpoint``. Collective.

    With FSDP2, on any number of ranks::

        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )

    FSDP2 expects states of all parameters, but parameters that never had a gradient have none
    (use ``DefaultLoadPlanner(allow_partial_load=True)``). Keys of states become strings.

    Args:
        path: of the directory; must not exist. The same on every rank, on a file system that all
            of them share.
        model: sharded or not.
        optimizer: one, or a mapping; the states of several are merged, as by
            ``get_optimizer_state_dict(model, optimizers)``.
        extra: the first rank's plain values, beside the model: ``{"step": 100}``.
        model_key: prefix of the model's keys; dots nest: "app.model".
        optimizer_key: the same for the optimizer.
        weights: as of `save`.

    Cost: as a `save`; memory for one box of a tensor twice.

    Raises:
        CheckpointExistsError: there is something at ``path``. Nothing is ever overwritten.
        CheckpointValueError: a state holds a value that is not plain data; names it.
        CheckpointMismatchError: ranks hold different models.
        CheckpointWriteError: disk full, no permission, no folder that all ranks share.
        RankMismatchError: another rank has died.

    After an error there are no new files.
    """
    writing = Writing(Path(path).absolute(), f"the export to {path}")
    flat: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}

    def collect() -> Contents:
        state = dict(extra or {}) if writing.ranks.is_first else {}
        if of_model := weights_of(model, weights):
            _nest(state, model_key, of_model)
        if optimizers := named(optimizer):
            trees = [NamedOptimizer(name, each, model).tree() for name, each in optimizers.items()]
            _nest(state, optimizer_key, merged(trees))
        found, of_keys = flat_state(state)
        flat.update(found)
        paths.update(of_keys)
        held = {key: each for key, each in flat.items() if isinstance(each, torch.Tensor)}
        for key, each in held.items():
            encoding.check(each, key)
        # If several ranks have a value, the first of them writes it.
        contents = Contents(planned=held, texts=dict.fromkeys(flat.keys() - held.keys(), ""))
        contents.mark_buffers(model)
        return contents

    def write() -> Any:
        boxes, others = [], []
        with DataWriter(writing.folder, data_file(writing.ranks.rank)) as writer:
            boxes_of = writing.ranks.going_on(writing.local.chosen(writing.task))
            for name, data, shape, offsets, sizes in boxes_of:
                span = astuple(write_item(writer, data, f"tensor {name!r}"))
                dtype = encoding.dtype_name(data.dtype)
                boxes.append([paths[name], dtype, shape, offsets, sizes, span])
            for key in sorted(writing.task["values"].keys() & flat.keys()):
                others.append(
                    [paths[key], astuple(write_item(writer, flat[key], f"value {key!r}"))]
                )
            writer.finish()
        return {"boxes": boxes, "values": others}

    def publish(stage: seal.Stage, written: list[Any]) -> None:
        publish_files(stage, write_metadata(stage.path, written))

    writing.plan(collect, options=[model_key, optimizer_key])
    writing.write(write, publish)


def merged(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states and options of several optimizers."""
    state: dict[str, Any] = {}
    groups: list[Any] = []
    for tree in trees:
        twice = sorted(map(str, state.keys() & tree["state"].keys()))
        if twice:
            raise CheckpointValueError(
                f"two optimizers have states of {twice[0]!r}, and this format keeps those of all "
                "together; export them one by one, with another optimizer_key"
            )
        state |= tree["state"]
        groups += tree["param_groups"]
    return {"state": state, "param_groups": groups}


def _nest(state: dict[str, Any], key: str, value: dict[str, Any]) -> None:
    """Put a value under a key. Dots in the key nest; with "" its items go to the top level."""
    *parts, last = key.split(".")
    for part in parts:
        inner = state.get(part, {})
        if not isinstance(inner, dict):
            raise _taken(part, key)
        state[part] = dict(inner)  # a copy: do not change the user's dict
        state = state[part]
    twice = [last] if last in state else []
    if not key:
        twice = sorted(map(str, state.keys() & value.keys()))
    if twice:
        raise _taken(twice[0], key)
    state |= {last: dict(value)} if key else value


def _taken(name: str, key: str) -> CheckpointValueError:
    return CheckpointValueError(
        f"extra has {name!r}, where keys of the model or the optimizers go ({key!r}): give it "
        "another name, or pass model_key= or optimizer_key="
    )


def flat_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Flatten a state: tensors and plain values by DCP's keys, and the path of each key."""
    try:
        flat, paths = compat.flattened(state)
    except ValueError as error:
        raise CheckpointValueError(f"the state cannot be flattened: {error}") from error
    for path in _empty_dicts(state):  # they have no leaves, so flattening drops them
        key = ".".join(path)
        flat[key], paths[key] = {}, path
    for key, each in flat.items():
        _, inner = encoding.encode(each, key)
        if inner and not isinstance(each, torch.Tensor):
            raise CheckpointValueError(
                f"{key!r} has tensors within a {type(each).__name__}; put them into a list or dict"
            )
    return flat, paths


def _empty_dicts(state: dict[Any, Any], *path: str) -> Iterator[tuple[str, ...]]:
    for key, each in state.items():
        if type(each) is dict:
            if each:
                yield from _empty_dicts(each, *path, str(key))
            else:
                yield *path, str(key)


Texts = dict[str, list[tuple[tuple[int, ...], Any]]]
_log = logging.getLogger(__name__)


def import_dcp(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    strict: bool = True,
    model_key: str | None = None,
    optimizer_key: str | None = None,
    weights: Weights = "all",
) -> dict[str, Any]:
    """Load a directory that ``torch.distributed.checkpoint`` has written, in place. Collective.

    As `load`: all or nothing, on any number of ranks, with any units and granularity. But the
    format has no checksums, so damaged elements are not detected.

    Args:
        path: of the directory.
        model: of the same architecture.
        optimizer: one, or a mapping of names. Each loads the states of its parameters, which the
            directory has by optimizer name or merged for all optimizers. States by number, as of
            ``optimizer.state_dict()``, are those of this optimizer's parameters, in their order.
        strict: refuse a checkpoint that lacks entries of the model or the optimizers.
        model_key: prefix of the model's keys: "model", "app.model"; "" for none. By default it is
            detected.
        optimizer_key: the same for the optimizers: "optimizer", "optim", "app.optim".
        weights: as of `load`.

    Returns:
        All other entries that are plain data: ``{"step": 100}``. Other objects are skipped, and
        the log says so.

    Cost: each rank reads the saved chunks that overlap its part; host memory for its
    part, and for one chunk.

    Raises:
        CheckpointIncompleteError: there is no such checkpoint, or it lacks files or entries.
        CheckpointCorruptError: it holds something that is not of this format or could run code,
            or an item cannot be read.
        CheckpointMismatchError: an entry has another shape, or states by number are of another
            number of parameters.

    After an error nothing has changed on any rank.
    """
    begin_load()
    ranks = everyone()
    change = Change(ranks, f"the import of {path}")
    others: dict[str, Any] = {}

    def prepare() -> str:
        directory = StockDirectory(Path(path))
        with DataReader(directory.folder, directory.files, advice="; nothing was loaded") as reader:
            optimizers = named(optimizer)
            keys = (model_key, optimizer_key)

            def by_number(name: str, groups: list[dict[str, Any]]) -> dict[Any, str]:
                weights_of(model, weights)  # puts shards in place of unsharded parameters
                return NamedOptimizer(name, optimizers[name], model).by_number(groups)

            found = StockNames(
                directory,
                reader,
                optimizers,
                *keys,
                strict=strict,
                with_model=weights != "none",
                by_number=by_number,
            )
            manifest = Manifest(
                Seal(directory.digest, 0, None, ""), 1, {}, directory.files, found.tensors, {}
            )
            texts: Texts = {name: [((0,), text)] for name, text in found.texts.items()}
            saved = Saved(str(path), manifest, texts, ranks.rank, strict)
            change.targets.append(ModelTarget(model, saved, weights=weights))
            change.targets += optimizer_targets(optimizers, model, saved)

            def boxes(name: str, chunk: Chunk) -> Boxes:
                dtype = found.tensors[name].dtype
                whole = directory.chunk(reader, dtype, chunk, f"tensor {name!r}")
                return lambda offsets, lengths: encoding.box_of(whole, offsets, lengths)

            change.take(arrivals(manifest, change.wanted, boxes))
            change.take(change.changed)
            others.update(plain_values(directory, reader, found.others))
        return directory.digest

    change.carry_out(prepare)
    return others


def plain_values(directory: StockDirectory, reader: DataReader, keys: list[str]) -> dict[str, Any]:
    """Read the values of these keys, nested as they were saved. Skips and logs other objects."""
    found: dict[str, Any] = {}
    left = [key for key in keys if key in directory.tensors]
    if left:
        shown = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
        what = "1 tensor" if len(left) == 1 else f"{len(left)} tensors"
        _log.warning("left out %s of %s: %s", what, directory.folder, shown)
    for key in keys:
        if key in directory.tensors:
            continue
        try:
            text = directory.value(reader, key)
        except CheckpointCorruptError as error:
            _log.warning("skipped %r: %s", key, error)
            continue
        put(found, directory.paths[key], encoding.decode(text, _no_tensor, key))
    return found


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointCorruptError(f"{name!r} is not a tensor of this checkpoint")
