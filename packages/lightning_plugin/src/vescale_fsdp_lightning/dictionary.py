"""Reads a sealed checkpoint in one process, as the dictionary that a checkpoint file would have.

`consolidate` writes this dictionary to a file; `loading` gives it to Lightning's own loaders.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from vescale_fsdp import CheckpointMismatchError, checkpoint
from vescale_fsdp.checkpoint import full
from vescale_fsdp_lightning.checkpoints import ALSO
from vescale_fsdp_lightning.places import Place
from vescale_fsdp_lightning.plain import from_plain

__all__ = ["load_directory", "read_dictionary"]

MapLocation = Callable[..., Any] | Mapping[str, Any] | torch.device | str | None


def read_dictionary(folder: Path) -> dict[str, Any]:
    """Return the dictionary of a sealed directory, with full tensors. Not collective.

    For a checkpoint of the Trainer it is the dictionary that ``DDPStrategy`` saves; for one of
    Fabric the user's own. It has no states of random number generators.

    Cost: every byte is read once and checked; memory for all of it.

    Raises:
        CheckpointIncompleteError: there is no checkpoint, or one of its files is missing.
        CheckpointCorruptError: its bytes differ from those that were saved.
        CheckpointMismatchError: it is in another format.
    """
    trees = checkpoint.read(folder)
    extra = trees.pop("extra", {})
    if "lightning" not in extra:
        raise CheckpointMismatchError(
            f"{folder} is not a sealed checkpoint of Lightning. For one that was saved with "
            'state_dict_type="dcp" use python -m lightning.pytorch.utilities.'
            "consolidate_checkpoint, for other formats vescale-fsdp checkpoint convert"
        )
    rest = from_plain(extra["lightning"])
    model = trees.pop("model")
    optimizers = {name.removeprefix("optimizer."): tree for name, tree in trees.items()}
    if "models" in extra:
        return {**_models(model, extra["models"]), **optimizers, **rest}
    by_number = {name: full.by_number(tree) for name, tree in optimizers.items()}
    own = sorted((name for name in by_number if name.isdecimal()), key=int)
    also = {name: tree for name, tree in by_number.items() if not name.isdecimal()}
    made = {"state_dict": model, **rest}
    if own:
        made["optimizer_states"] = [by_number[name] for name in own]
    return {**made, ALSO: also} if also else made


def _models(state: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Return the states of Fabric's models by their keys.

    If there are several models, the names in ``state`` begin with the key of their model.
    """
    if len(keys) == 1:
        return {keys[0]: state}
    return {
        key: {n.removeprefix(f"{key}."): t for n, t in state.items() if n.startswith(f"{key}.")}
        for key in keys
    }


def load_directory(path: str | Path, map_location: MapLocation = None) -> dict[str, Any] | None:
    """Return the dictionary of a sealed directory, or None if there is none. Not collective.

    Args:
        path: on this machine, or on any file system that fsspec supports.
        map_location: as in ``torch.load``, for tensors that were saved from host memory.
    """
    place = Place(path).found()
    if place.is_file or not place.is_whole:
        return None
    if place.is_local:
        found = read_dictionary(Path(place.path))
    else:
        with tempfile.TemporaryDirectory(prefix="vescale-fsdp-") as folder:
            copy = Path(folder) / "checkpoint"
            place.fs.get(place.path, str(copy), recursive=True)
            found = read_dictionary(copy)
    return tree_map_only(torch.Tensor, lambda tensor: _mapped(tensor, map_location), found)  # type: ignore[no-any-return]


def _mapped(tensor: torch.Tensor, location: MapLocation) -> torch.Tensor:
    if isinstance(location, Mapping):
        location = location.get("cpu")
    if callable(location):
        storage = location(tensor.untyped_storage(), "cpu")
        location = None if storage is None else storage.device
    return tensor if location is None else tensor.to(location)
