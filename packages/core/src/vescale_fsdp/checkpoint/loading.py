"""load: read and verify on every rank, agree that all is intact, then apply.

After a failure, model, optimizers and counters are bitwise unchanged on all ranks (see `reading`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vescale_fsdp.checkpoint.contents import PER_RANK, Optimizers, Stateful, Weights, named
from vescale_fsdp.checkpoint.files import DataReader
from vescale_fsdp.checkpoint.manifest import Manifest
from vescale_fsdp.checkpoint.ranks import all_ranks
from vescale_fsdp.checkpoint.reading import Change, read
from vescale_fsdp.checkpoint.saving import finish_saves
from vescale_fsdp.checkpoint.sealed import read_manifest, read_text
from vescale_fsdp.checkpoint.targets import (
    FeedbackTarget,
    ModelTarget,
    RngTarget,
    Saved,
    StatefulTarget,
    ValueTarget,
    optimizer_targets,
)
from vescale_fsdp.errors import CheckpointCorruptError


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    strict: bool = True,
    stateful: Mapping[str, Stateful] | None = None,
    rng: bool | None = None,
    weights: Weights = "all",
) -> dict[str, Any]:
    """Load a checkpoint into model and optimizers, in place. Collective.

    The number of ranks, the units, the granularity and the mesh may differ from those at the save.

    Args:
        path: of a directory that `save` has written.
        model: of the same architecture. Elements are cast to the model's dtypes.
        optimizer: one, or a mapping with the same names as in the save.
        strict: refuse a checkpoint that lacks entries for the arguments. Other entries of the
            checkpoint are ignored.
        stateful: as in the save. States that differed between ranks load only on as many ranks.
        rng: restore the random number generators of each rank; by default if an
            optimizer is loaded. On more ranks than have saved, those without a state get seeds.
        weights: of the model, as in the save. "trained" and "none" do not change the other
            parameters, even if all were saved.

    Returns:
        The ``extra`` of the save, the same on every rank.

    Cost: all bytes are read once, those that several ranks need by each of them; host memory
    for this rank's part, or for one tensor if the model has no values yet (after
    ``to_empty``); two small messages per rank.

    Raises:
        CheckpointIncompleteError: there is no whole checkpoint at ``path``, it lacks entries, or
            another rank has died.
        CheckpointCorruptError: bytes differ from those that were saved; names the file and tensor.
        CheckpointMismatchError: an entry has another shape.

    After an error nothing has changed on any rank.
    """
    check_last = finish_saves()
    ranks, folder = all_ranks(), Path(path)
    change = Change(ranks, f"the load of {path}")
    with_rng = optimizer is not None if rng is None else rng
    returned: dict[str, Any] = {}

    def prepare() -> Any:
        check_last()
        manifest = read_manifest(folder)
        with DataReader(folder, manifest.files) as reader:
            texts = _read_texts(reader, manifest, ranks.rank)
            saved = Saved(str(folder), manifest, texts, ranks.rank, strict)
            change.targets.append(ModelTarget(model, saved, weights=weights))
            change.targets += optimizer_targets(named(optimizer), model, saved)
            for name, other in (stateful or {}).items():
                change.targets.append(StatefulTarget(name, other, saved))
            if optimizer is not None:
                change.targets.append(FeedbackTarget(model, saved, ranks.size))
            extra = ValueTarget("extra", saved)
            change.targets.append(extra)
            if with_rng:
                change.targets.append(RngTarget(saved))
            change.take(read(reader, manifest, change.wanted, ranks.rank, ranks.size))
        if not isinstance(extra.value, dict):
            raise CheckpointCorruptError(f"the extra of {folder} is not a mapping")
        returned.update(extra.value)
        return [manifest.seal.id, manifest.seal.body_crc32]

    change.carry_out(prepare)
    return returned


def _read_texts(
    reader: DataReader, manifest: Manifest, rank: int
) -> dict[str, list[tuple[tuple[int, ...], Any]]]:
    """Read the values as JSON. Of values that differ between ranks, only this rank's."""
    texts: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for name, variants in manifest.values.items():
        texts[name] = []
        is_own = name.partition(".")[0] in PER_RANK
        for variant in variants:
            if is_own and len(variants) > 1 and rank not in variant.ranks:
                texts[name].append((variant.ranks, None))
                continue
            text = read_text(reader, name, variant.span)
            texts[name].append((variant.ranks, text))
    return texts
