"""import_dcp: what FSDP2 and torch.distributed.checkpoint have saved, into model and optimizers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale_fsdp.checkpoint.dcp.directory import StockDirectory
from vescale_fsdp.checkpoint.dcp.names import StockNames, put
from vescale_fsdp.checkpoint.disk.files import DataReader
from vescale_fsdp.checkpoint.disk.manifest import Manifest, Seal
from vescale_fsdp.checkpoint.sealed.save import finish_saves
from vescale_fsdp.checkpoint.state import values
from vescale_fsdp.checkpoint.state.contents import Optimizers, Weights, named
from vescale_fsdp.checkpoint.state.targets import ModelTarget, Saved, optimizer_targets
from vescale_fsdp.checkpoint.transfer.change import Change
from vescale_fsdp.checkpoint.transfer.ranks import all_ranks
from vescale_fsdp.checkpoint.transfer.reading import Arrival, parts_of
from vescale_fsdp.errors import CheckpointCorruptError

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

    As `load`: all of it or nothing, on any number of ranks, with any units and granularity. But the
    format has no checksums: damaged elements are loaded as they are.

    Args:
        path: of the directory.
        model: of the same architecture.
        optimizer: one, or a mapping of names. Each takes the states of its parameters from where
            the directory has them: by name, or those of all optimizers together.
        strict: refuse a checkpoint that lacks entries of the model or the optimizers.
        model_key: what the model's keys begin with: "model", "app.model"; "" if with nothing. By
            default it is looked for.
        optimizer_key: the same for the optimizers: "optimizer", "optim", "app.optim".
        weights: of the model: "all"; "trained", without what is frozen; or "none", for optimizers
            alone.

    Returns:
        What else is there, if it is plain data: ``{"step": 100}``. Other objects are left out, and
        the log says so.

    Cost: each rank reads the saved chunks of which it needs a part; memory in the host for its
    part, and for one chunk.

    Raises:
        CheckpointIncompleteError: there is no such checkpoint, or it lacks files or entries.
        CheckpointCorruptError: it holds something that is not of this format or could run code,
            or an item cannot be read.
        CheckpointMismatchError: an entry has another shape.

    After an error nothing has changed, on any rank.
    """
    check_last = finish_saves()
    ranks = all_ranks()
    change = Change(ranks, f"the import of {path}")
    others: dict[str, Any] = {}

    def prepare() -> str:
        check_last()
        directory = StockDirectory(Path(path))
        with DataReader(directory.folder, directory.files, advice="; nothing was loaded") as reader:
            optimizers = named(optimizer)
            keys = (model_key, optimizer_key)
            found = StockNames(
                directory, reader, optimizers, *keys, strict=strict, with_model=weights != "none"
            )
            manifest = Manifest(
                Seal(directory.digest, 0, None, ""), 1, {}, directory.files, found.tensors, {}
            )
            texts: Texts = {name: [((0,), text)] for name, text in found.texts.items()}
            saved = Saved(str(path), manifest, texts, ranks.rank, strict)
            change.targets.append(ModelTarget(model, saved, weights=weights))
            change.targets += optimizer_targets(optimizers, model, saved)
            change.take(_arrivals(directory, reader, manifest, change.wanted))
            others.update(plain_values(directory, reader, found.others))
        return directory.digest

    change.carry_out(prepare)
    return others


def _arrivals(
    directory: StockDirectory,
    reader: DataReader,
    manifest: Manifest,
    wanted: Mapping[str, torch.Tensor],
) -> Iterator[Arrival]:
    parts = parts_of(manifest, wanted)
    for span in sorted(parts, key=lambda span: (span.file, span.offset)):
        name, chunk = parts[span][0].name, parts[span][0].chunk
        dtype = manifest.tensors[name].dtype
        whole = directory.chunk(reader, dtype, chunk, f"tensor {name!r}")
        for part in parts[span]:
            index = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.lengths, strict=True))
            yield Arrival(name, part.place, whole[index].clone())


def plain_values(directory: StockDirectory, reader: DataReader, keys: list[str]) -> dict[str, Any]:
    """The values of some keys that are plain data, nested as they were. Others are logged."""
    found: dict[str, Any] = {}
    for key in keys:
        if key in directory.tensors:
            _log.info("left out the tensor %r of %s", key, directory.folder)
            continue
        try:
            text = directory.value(reader, key)
        except CheckpointCorruptError as error:
            _log.warning("left out %r: %s", key, error)
            continue
        put(found, directory.paths[key], values.decode(text, _no_tensor, key))
    return found


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointCorruptError(f"{name!r} is no tensor of this checkpoint")
