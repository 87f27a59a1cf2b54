"""Saves and loads the directory of Lightning's own strategies: torch's DCP format and ``meta.pt``.

Lightning's consolidation tool reads it. Model tensors are under ``model``, as in Lightning's FSDP
strategy. (Its model-parallel strategy uses ``state_dict``, with which the tool fails.) Optimizer
states are under ``optimizer_0`` and so on, by parameter names. There are no checksums.

DCP's metadata, ``meta.pt`` and items that are not tensors are pickles. The metadata are read by an
unpickler that builds only the classes of the format; the others are read as ``weights_only`` says.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from vescale_fsdp import CheckpointCorruptError, CheckpointIncompleteError, CheckpointValueError
from vescale_fsdp.checkpoint import UnreadTensor, full
from vescale_fsdp.spi import open_regular, read_all, size_of
from vescale_fsdp_lightning.places import Place, from_first

__all__ = ["METADATA", "Directory", "read_file", "save"]

METADATA = ".metadata"
_VALUES = "meta.pt"


def save(folder: Path, state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Write the directory. It gets its name when it is complete. Collective.

    Args:
        state: model and optimizers, by names. Tensors are sharded.
        values: all other values. Those of the first process are written.
    """
    unfinished = folder.with_name(f"{folder.name}.tmp")
    from_first(lambda: Place(unfinished).remove())
    state_dict_saver.save(dict(state), checkpoint_id=unfinished)

    def finish() -> None:
        torch.save(dict(values), unfinished / _VALUES)
        unfinished.rename(folder)

    from_first(finish)


class Directory:
    """The contents of such a directory. All methods that load are collective.

    Raises:
        CheckpointCorruptError: the metadata do not have this format.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = _Reader(folder)
        self._entries = self._reader.read_metadata()
        self._paths: dict[str, tuple[Any, ...]] = dict(self._entries.planner_data or {})

    @property
    def keys(self) -> set[str]:
        """The first parts of the keys, such as "model" and "optimizer_0"."""
        return {str(path[0]) for path in self._paths.values()}

    def has(self, key: str) -> bool:
        """Whether there are entries under ``key``."""
        return key in self.keys

    def first_of(self, keys: Sequence[str]) -> str:
        """Return the first of these keys that has entries.

        Raises:
            CheckpointIncompleteError: none has.
        """
        for key in keys:
            if self.has(key):
                return key
        raise CheckpointIncompleteError(
            f"{self._folder} has none of {', '.join(keys)}: it is not a checkpoint of Lightning"
        )

    def unread_state(self, key: str) -> dict[str, Any]:
        """Return the entries under ``key``, tensors without their elements. No communication."""
        state: dict[str, Any] = {}
        for name, entry in self._entries.state_dict_metadata.items():
            if not name.startswith(f"{key}."):
                continue
            if isinstance(entry, metadata.BytesStorageMetadata):
                found = {name: None}
                self._fill(found, no_dist=True)
                state[name.removeprefix(f"{key}.")] = found[name]
                continue
            shape, dtype = entry.size, entry.properties.dtype

            def read(name: str = name, shape: Any = shape, dtype: Any = dtype) -> torch.Tensor:
                whole = torch.empty(shape, dtype=dtype)
                self._fill({name: whole}, no_dist=True)
                return whole

            made = UnreadTensor(str(self._folder), name, shape, dtype, read)
            state[name.removeprefix(f"{key}.")] = made
        return state

    def load_model(self, key: str, model: nn.Module, *, strict: bool) -> None:
        """Load a model in place, as `load_state` does."""
        self.load_state(self.unread_state(key), model, strict=strict)

    def load_state(self, state: Mapping[str, Any], model: nn.Module, *, strict: bool) -> None:
        """Load a model in place. If it fails, a part of the model may already be changed.

        Args:
            state: that of `unread_state`, perhaps with changes. Of what nobody has read, each rank
                reads its part.

        Raises:
            CheckpointIncompleteError: with ``strict``, entries are missing.
        """
        own = full.model_state(model)
        missing = sorted(own.keys() - state.keys())
        if missing and strict:
            raise CheckpointIncompleteError(
                f"{self._folder} lacks {len(missing)} entries of the model: "
                f"{', '.join(missing[:5])}"
            )
        targets: dict[str, Any] = {}
        loaded: dict[str, Any] = {}
        for name, target in own.items():  # the same order on all ranks: tensors may be gathered
            if name not in state:
                continue
            value = state[name]
            is_unread = isinstance(value, UnreadTensor) and not value.is_read
            if is_unread and value.key not in targets:
                loaded[name] = targets[value.key] = target
            elif isinstance(target, torch.Tensor):
                loaded[name] = full.part_of(read_all(value), target, name)
            else:
                loaded[name] = value
        self._fill(targets)
        set_model_state_dict(model, loaded, options=StateDictOptions(strict=False))

    def _fill(self, targets: dict[str, Any], *, no_dist: bool = False) -> None:
        reader = _Reader(self._folder) if no_dist else self._reader
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
            state_dict_loader.load(
                targets, storage_reader=reader, planner=_Planner(), no_dist=no_dist
            )

    def load_optimizer(self, key: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load an optimizer in place. Its tensors are replaced."""
        param_of = full.parameters(model, optimizer)
        targets: dict[str, Any] = {}
        for name, path in self._paths.items():
            if path[0] != key:
                continue
            entry = self._entries.state_dict_metadata[name]
            param = param_of.get(str(path[2])) if path[1] == "state" else None
            if isinstance(entry, metadata.BytesStorageMetadata):
                targets[name] = None
            elif isinstance(param, DTensor) and entry.size == param.shape and param.dim():
                dtype = entry.properties.dtype
                targets[name] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
            else:
                targets[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
        self._fill(targets)
        tree = _nested({self._paths[name][1:]: value for name, value in targets.items()})
        full.load_optimizer(model, optimizer, {"state": tree.get("state", {}), **_groups(tree)})

    def values(self, weights_only: bool) -> dict[str, Any]:
        """Read ``meta.pt``."""
        file = self._folder / _VALUES
        if not file.is_file():
            return {}
        return read_file(file, weights_only)


def read_file(path: Path, weights_only: bool) -> dict[str, Any]:
    """Read a file of ``torch.save``. Its tensors are mapped from the file, not copied.

    Raises:
        CheckpointValueError: with ``weights_only``, it has more than tensors and plain values.
    """
    try:
        read: dict[str, Any] = torch.load(
            path, mmap=True, map_location="cpu", weights_only=weights_only
        )
    except Exception as error:
        if not weights_only or "weights_only" not in str(error):
            raise
        raise CheckpointValueError(
            f"{path} holds objects that could run code when they are loaded: {error}\nIf you trust "
            "the file, pass VeScaleFSDPStrategy(weights_only=False)"
        ) from error
    return read


def _groups(tree: Mapping[str, Any]) -> dict[str, Any]:
    groups = tree["param_groups"]
    if isinstance(groups, dict):  # a list that was flattened
        groups = [_lists(groups[index]) for index in sorted(groups)]
    return {"param_groups": groups}


def _lists(group: Any) -> Any:
    if isinstance(group, dict) and group and all(isinstance(key, int) for key in group):
        return [group[index] for index in sorted(group)]
    return (
        {key: _lists(value) for key, value in group.items()} if isinstance(group, dict) else group
    )


def _nested(flat: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return values by paths as nested dicts. A list becomes a dict with numbers as keys."""
    tree: dict[Any, Any] = {}
    for path, value in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree


class _Reader(filesystem.FileSystemReader):
    def read_metadata(self, *args: Any, **options: Any) -> metadata.Metadata:
        """Read the metadata with the restricted unpickler."""
        from vescale_fsdp.spi import MetadataUnpickler  # loaded at its first use

        file = Path(self.path) / ".metadata"
        try:
            with open_regular(file) as stream:
                found = MetadataUnpickler(io.BufferedReader(stream)).load()
        except pickle.UnpicklingError as error:
            raise CheckpointCorruptError(
                f"{file} is refused: it needs {error}, which is not part of this format and could "
                "run code"
            ) from error
        if not isinstance(found, metadata.Metadata):
            raise CheckpointCorruptError(
                f"{file} holds a {type(found).__name__}, expected metadata"
            )
        for each in {info.relative_path for info in found.storage_data.values()}:
            size_of(Path(self.path) / each)  # raises for a FIFO, on which torch would wait
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read an item that is not a tensor with ``weights_only=True``."""
        plain = torch.load(value, weights_only=True)
        again = io.BytesIO()  # the checked value again: the planner would unpickle anything
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)
