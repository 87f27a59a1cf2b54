"""read: a whole checkpoint in one process, without the model and the ranks that saved it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from vescale_fsdp.checkpoint.disk.manifest import DTYPES
from vescale_fsdp.checkpoint.sources import Source, open_source
from vescale_fsdp.checkpoint.state import values
from vescale_fsdp.errors import CheckpointIncompleteError


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """All that a checkpoint holds, to look into it or to write it otherwise. Not collective.

    Args:
        path: of a checkpoint of `save`, of a DCP directory, or of safetensors.

    Returns:
        ``{"model": {name: tensor}, "optimizer.0": {"state": ..., "param_groups": ...}, "extra":
        ...}`` with whole tensors in the host's memory, tied ones once. Optimizers by the names of
        parameters, as `full.optimizer_state` has them; "0" is the name of the only one. What each
        rank has of its own is left out: generators, data loaders, error feedback.

    Cost: every byte is read once, and checked as far as the format can; memory for all of it.

    Raises:
        CheckpointIncompleteError: there is no checkpoint, or something of it is missing.
        CheckpointCorruptError: its bytes are not those that were saved.
    """
    found: dict[str, torch.Tensor] = {}
    with open_source(Path(path)) as source:

        def tensor_of(name: str) -> torch.Tensor:
            if name not in found:
                found[name] = _tensor(source, name, path)
            return found[name]

        return {name: values.decode(text, tensor_of, name) for name, text in source.texts.items()}


def read_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``extra`` of a checkpoint of `save`. Not collective.

    Cost: the manifest, the values beside the tensors, and the tensors in ``extra``.

    Raises:
        CheckpointIncompleteError, CheckpointCorruptError: as `read`.
    """
    with open_source(Path(path)) as source:
        text = source.texts.get("extra", {})
        found = values.decode(text, lambda name: _tensor(source, name, path), "extra")
    return found if isinstance(found, dict) else {}


def _tensor(source: Source, name: str, path: str | os.PathLike[str]) -> torch.Tensor:
    entry = source.tensors.get(name)
    if entry is None:
        raise CheckpointIncompleteError(f"the checkpoint at {path} lacks the tensor {name!r}")
    made = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    for chunk in entry.chunks:
        box = made
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            box = box.narrow(dim, offset, size)
        box.copy_(source.read(name, chunk))
    return made
