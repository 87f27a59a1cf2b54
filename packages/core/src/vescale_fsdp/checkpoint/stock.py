"""Checkpoints in the format of torch.distributed.checkpoint (DCP): an explicit import.

Their ``.metadata`` is a pickle, and so is each item that is no tensor: what `load` never reads.
Here both are read by unpicklers that build the classes of that format, and call nothing else. The
bytes have no checksums: what was damaged or is a mix of two steps is loaded as it is, and a load
that fails half-way leaves a model that is half loaded.

This also reads what ``vescale_fsdp.checkpoint.save`` wrote before it had a format of its own.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from vescale_fsdp import compat
from vescale_fsdp.checkpoint.contents import Optimizers, named
from vescale_fsdp.checkpoint.ranks import all_ranks
from vescale_fsdp.errors import CheckpointCorruptError, CheckpointIncompleteError

__all__ = ["import_dcp"]

_EXTRA = "extra.json"


def import_dcp(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Load a directory that ``torch.distributed.checkpoint`` has written, in place. Collective.

    Keys are ``model.<fqn>`` and ``optimizer.<name>.state.<fqn>.<state>``; a single optimizer is
    "0". The number of ranks, the units and the granularity may differ from those at the save.

    Args:
        path: of the directory.
        model: of the same architecture.
        optimizer: one, or a mapping with the names that were used to save.
        strict: refuse a checkpoint that lacks entries of the model or the optimizers.

    Returns:
        What is in ``extra.json``, or nothing.

    Raises:
        CheckpointIncompleteError: there is no such checkpoint, or it lacks entries. Nothing has
            changed then.
        CheckpointCorruptError: it holds something that is not of this format.
    """
    source = Path(path)
    reader = _Reader(source)
    state: dict[str, Any] = {}
    stateless: dict[str, set[str]] = {}

    def prepare() -> None:
        if not (source / ".metadata").is_file():
            raise CheckpointIncompleteError(
                f"there is no checkpoint of torch.distributed.checkpoint at {source}"
            )
        saved = set(reader.read_metadata().state_dict_metadata)
        state.update(_state(model, optimizer))
        stateless.update({n: _drop_stateless(n, state, saved) for n in state["optimizer"]})
        missing = sorted(compat.flattened_keys(state) - saved) if strict else []
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise CheckpointIncompleteError(
                f"the checkpoint {source} lacks {len(missing)} entries: {shown}. Load it into the "
                "model and optimizers it was saved from, or pass strict=False"
            )

    all_ranks().agree(f"the import of {source}", prepare)
    planner = _Planner(allow_partial_load=not strict)
    state_dict_loader.load(state, storage_reader=reader, planner=planner)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=strict))
    names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
    for name, each in named(optimizer).items():
        options = StateDictOptions(strict=strict and not stateless[name])
        set_optimizer_state_dict(model, each, state["optimizer"][name], options=options)
        for param in [p for p in each.state if names.get(p) in stateless[name]]:
            del each.state[param]
    file = source / _EXTRA
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def _state(model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": {
            name: get_optimizer_state_dict(model, each) for name, each in named(optimizer).items()
        },
    }


def _drop_stateless(name: str, state: dict[str, Any], saved: set[str]) -> set[str]:
    """Take out of ``state`` the parameters that had no optimizer state at the save.

    An optimizer has none for a parameter that never had a gradient, and must have none after
    the load either. Returns their names; empty if the optimizer was not saved at all, so that
    its entries are found to be lacking.
    """
    prefix = f"optimizer.{name}.state."
    if not any(key.startswith(prefix) for key in saved):
        return set()
    states = state["optimizer"][name]["state"]
    absent = {
        fqn for fqn, each in states.items() if not any(f"{prefix}{fqn}.{k}" in saved for k in each)
    }
    for fqn in absent:
        del states[fqn]
    return absent


class _Unpickler(pickle.Unpickler):
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
        raise pickle.UnpicklingError(f"{module}.{name}")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """The metadata, by the restricted unpickler."""
        file = Path(self.path) / ".metadata"
        try:
            with open(file, "rb") as stream:
                found = _Unpickler(stream).load()
        except pickle.UnpicklingError as error:
            raise CheckpointCorruptError(
                f"{file} is refused: it wants {error}, which is no part of this format and could "
                "run code"
            ) from error
        if not isinstance(found, Metadata):
            raise CheckpointCorruptError(f"{file} holds a {type(found).__name__}, no metadata")
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read an item that is no tensor with torch's restricted unpickler only."""
        plain = torch.load(value, weights_only=True)
        again = io.BytesIO()  # of what was found harmless; the planner itself would read anything
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)
