"""Reads checkpoints of all supported formats, one chunk at a time, without a model.

A `Source` lists tensors with their chunks, and values as JSON that contains the tensors' names. All
formats use the names of `save`. Those that are not ours are opened by `foreign`, which is loaded
for them alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from vescale_fsdp.checkpoint import encoding
from vescale_fsdp.checkpoint.files import DataReader
from vescale_fsdp.checkpoint.manifest import DTYPES, NAME, Chunk, TensorEntry
from vescale_fsdp.checkpoint.seal import read_manifest, read_text
from vescale_fsdp.checkpoint.unread import UnreadTensor
from vescale_fsdp.errors import CheckpointCorruptError, CheckpointIncompleteError


class Source(Protocol):
    """An open checkpoint.

    Attributes:
        format: its name in `convert`.
        tensors: the chunks of each tensor.
        texts: values by name: "model", "optimizer.<name>", "extra".
        step: the training step, if known.
    """

    format: str
    tensors: dict[str, TensorEntry]
    texts: dict[str, dict[str, Any]]
    step: int | None

    def read(self, name: str, chunk: Chunk) -> torch.Tensor:
        """Read the elements of a chunk. Their CRC32 is checked if the format has one."""


@contextlib.contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open the checkpoint at a path. The format is detected."""
    with contextlib.ExitStack() as stack:
        if (path / NAME).exists():
            yield _Sealed(path, stack)
        else:
            from vescale_fsdp.checkpoint import foreign

            yield foreign.opened(path, stack)


class _Sealed:
    format = "vescale"

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        manifest = read_manifest(path)
        self.reader = stack.enter_context(DataReader(path, manifest.files, advice=""))
        self.step = manifest.seal.step
        self.texts: dict[str, dict[str, Any]] = {}
        for name, variants in manifest.values.items():
            if name.partition(".")[0] not in ("model", "optimizer", "extra"):
                continue
            for variant in variants:  # ranks may have saved different parts of the model
                text = _checked(name, read_text(self.reader, name, variant.span))
                self.texts[name] = _united(self.texts[name], text) if name in self.texts else text
        wanted = ("model.", "optimizer.", "extra.")
        self.tensors = {n: e for n, e in manifest.tensors.items() if n.startswith(wanted)}

    def read(self, name: str, chunk: Chunk) -> torch.Tensor:
        data = self.reader.read(chunk.span, f"tensor {name!r}")
        return data.view(DTYPES[self.tensors[name].dtype]).view(chunk.sizes)


def _checked(name: str, text: encoding.Json) -> dict[str, Any]:
    parts = {"state": dict, "param_groups": list} if name.startswith("optimizer.") else {}
    fits = isinstance(text, dict) and all(type(text.get(k)) is kind for k, kind in parts.items())
    if not fits:
        raise CheckpointCorruptError(f"the value {name!r} is refused: it is malformed")
    return dict(text)


def _united(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge the values of ranks that have different parameters."""
    if "param_groups" in first:
        groups = [*first["param_groups"], *other["param_groups"]]
        return {"state": {**other["state"], **first["state"]}, "param_groups": groups}
    return {**other, **first}


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a whole checkpoint, to inspect it or to write it in another way. Not collective.

    Args:
        path: of a checkpoint of `save`, of a DCP directory, of one of DeepSpeed, or of safetensors.

    Returns:
        ``{"model": {name: tensor}, "optimizer.0": {"state": ..., "param_groups": ...}, "extra":
        ...}`` with whole tensors in host memory, tied ones once. Optimizer states are by parameter
        name, as in `full.optimizer_state`; a single optimizer has the name "0". The state of single
        ranks is left out: generators, data loaders, error feedback.

    Cost: every byte is read once, and checked as far as the format can; memory for all of it.

    Raises:
        CheckpointIncompleteError: there is no checkpoint, or it is incomplete.
        CheckpointCorruptError: its bytes differ from those that were saved.
    """
    found: dict[str, torch.Tensor] = {}
    with open_source(Path(path)) as source:

        def tensor_of(name: str) -> torch.Tensor:
            if name not in found:
                found[name] = _tensor(source, name, path)
            return found[name]

        return {name: encoding.decode(text, tensor_of, name) for name, text in source.texts.items()}


def read_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``extra`` of a checkpoint of `save`. Not collective.

    Cost: reads the manifest, the values beside the tensors, and the tensors in ``extra``.

    Raises:
        CheckpointIncompleteError, CheckpointCorruptError: as `read`.
    """
    with open_source(Path(path)) as source:
        text = source.texts.get("extra", {})
        found = encoding.decode(text, lambda name: _tensor(source, name, path), "extra")
    return found if isinstance(found, dict) else {}


def unread_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The model's state dict in a checkpoint of `save`, without its elements. Not collective.

    Pass it to ``checkpoint.load(path, model, weights=...)``, after changes.

    Cost: reads the manifest and the values beside the tensors. Each tensor that is looked at is
    read whole, checked, and kept.

    Raises:
        CheckpointIncompleteError, CheckpointCorruptError: as `load`, also when a tensor is read.
    """
    folder = Path(path)
    made: dict[str, UnreadTensor] = {}
    with contextlib.ExitStack() as stack:
        source = _Sealed(folder, stack)

    def read_again(name: str) -> torch.Tensor:
        with source.reader:
            return _tensor(source, name, path)

    def tensor_of(name: str) -> torch.Tensor:
        if name not in made:
            entry, read = _entry(source, name, path), functools.partial(read_again, name)
            made[name] = UnreadTensor(str(folder), name, entry.shape, DTYPES[entry.dtype], read)
        return made[name]

    state: dict[str, Any] = encoding.decode(source.texts["model"], tensor_of, "model")
    return state


def _entry(source: Source, name: str, path: str | os.PathLike[str]) -> TensorEntry:
    if name not in source.tensors:
        raise CheckpointIncompleteError(f"the checkpoint at {path} lacks the tensor {name!r}")
    return source.tensors[name]


def _tensor(source: Source, name: str, path: str | os.PathLike[str]) -> torch.Tensor:
    return assembled(_entry(source, name, path), lambda chunk: source.read(name, chunk))


def assembled(entry: TensorEntry, read: Callable[[Chunk], torch.Tensor]) -> torch.Tensor:
    """Return a whole tensor, made of its chunks."""
    made = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    for chunk in entry.chunks:
        box = made
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            box = box.narrow(dim, offset, size)
        box.copy_(read(chunk))
    return made
