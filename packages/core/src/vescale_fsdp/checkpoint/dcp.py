"""Save and load through torch.distributed.checkpoint.

A checkpoint is a directory::

    step-100/
      .metadata, __0_0.distcp, __1_0.distcp, ...   tensors, written by the rank that holds them
      extra.json                                   what the user gave as ``extra``

Keys are ``model.<fqn>`` and ``optimizer.<name>.state.<fqn>.<state>``; they do not depend on the
number of ranks, the units or the cuts. A save goes to ``<path>.partial`` and is renamed when all
ranks have written, so a path that exists holds a whole checkpoint.

DCP's ``.metadata`` is a pickle: load only checkpoints that you trust.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from vescale_fsdp.errors import CheckpointIncompleteError

__all__ = ["SaveHandle", "load", "save"]

Optimizers = Optimizer | Mapping[str, Optimizer] | None
_EXTRA = "extra.json"
_PARTIAL = ".partial"


class SaveHandle:
    """A save that has been started. All saves are done when they return, for now."""

    def wait(self) -> None:
        """Return when the checkpoint is whole on disk."""


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Mapping[str, Any] | None = None,
    async_: bool = False,
) -> SaveHandle:
    """Save model, optimizers and ``extra`` into a new directory. Collective.

    Args:
        path: of the directory; must not exist. The same on every rank.
        model: sharded or not; its state dict is saved.
        optimizer: one, or a mapping of names to several.
        extra: whatever JSON can hold (step, losses, ...); the first rank's is written.
        async_: not there yet.

    Cost: each rank writes its own shards; a few small messages; no extra memory for tensors.

    Raises:
        FileExistsError: there is something at ``path`` already. Nothing is ever overwritten.
        TypeError: ``extra`` is not JSON.
    """
    if async_:
        raise NotImplementedError("checkpoint.save(async_=True) is not there yet")
    text = json.dumps(dict(extra or {}))
    target = Path(path)
    partial = target.with_name(target.name + _PARTIAL)
    _all_or_none(_occupied(target))
    if _rank() == 0 and partial.exists():  # left by a save that was killed
        shutil.rmtree(partial)
    _barrier()
    state_dict_saver.save(_state(model, optimizer), checkpoint_id=partial)
    if _rank() == 0:
        (partial / _EXTRA).write_text(text)
        partial.rename(target)
    _barrier()
    return SaveHandle()


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint into model and optimizers, in place. Collective.

    The number of ranks, the units and the granularity may differ from those at the save.

    Args:
        path: of a directory that `save` has written.
        model: of the same architecture.
        optimizer: one, or a mapping with the names that were used to save.
        strict: refuse a checkpoint that lacks entries of the model or the optimizers.

    Returns:
        The ``extra`` of the save.

    Raises:
        CheckpointIncompleteError: there is no whole checkpoint at ``path``, or it lacks entries.
    """
    source = Path(path)
    reader = FileSystemReader(source)
    state = _state(model, optimizer)
    stateless: dict[str, set[str]] = {}
    error = _not_whole(source)
    if error is None:
        saved = set(reader.read_metadata().state_dict_metadata)
        stateless = {name: _drop_stateless(name, state, saved) for name in state["optimizer"]}
        error = _lacking(source, state, saved) if strict else None
    _all_or_none(error)
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    state_dict_loader.load(state, storage_reader=reader, planner=planner)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=strict))
    names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
    for name, each in _named(optimizer).items():
        options = StateDictOptions(strict=strict and not stateless[name])
        set_optimizer_state_dict(model, each, state["optimizer"][name], options=options)
        for param in [p for p in each.state if names.get(p) in stateless[name]]:
            del each.state[param]
    found: dict[str, Any] = json.loads((source / _EXTRA).read_text())
    return found


def _state(model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": {
            name: get_optimizer_state_dict(model, each) for name, each in _named(optimizer).items()
        },
    }


def _named(optimizer: Optimizers) -> Mapping[str, Optimizer]:
    if optimizer is None:
        return {}
    return {"0": optimizer} if isinstance(optimizer, Optimizer) else optimizer


def _occupied(target: Path) -> Exception | None:
    if not target.exists():
        return None
    return FileExistsError(
        f"{target} exists already, and a checkpoint is never overwritten; save to another path"
    )


def _not_whole(source: Path) -> Exception | None:
    if (source / ".metadata").is_file() and (source / _EXTRA).is_file():
        return None
    partial = source.with_name(source.name + _PARTIAL)
    hint = f"; {partial} is a save that was not finished" if partial.exists() else ""
    return CheckpointIncompleteError(f"there is no whole checkpoint at {source}{hint}")


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


def _lacking(source: Path, state: dict[str, Any], saved: set[str]) -> Exception | None:
    missing = sorted(_keys(state) - saved)
    if not missing:
        return None
    shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    return CheckpointIncompleteError(
        f"the checkpoint {source} lacks {len(missing)} entries: {shown}. Load it into the model "
        "and optimizers it was saved from, or pass strict=False"
    )


def _keys(state: dict[str, Any]) -> set[str]:
    """The keys that DCP gives to the entries of a nested state."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, _ = flatten_state_dict(state)
    return set(flat)


def _all_or_none(error: Exception | None) -> None:
    """Raise on every rank where any rank has an error, so that no rank waits for the others."""
    errors: list[Exception | None] = [error]
    if dist.is_initialized() and dist.get_world_size() > 1:
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    for rank, found in enumerate(errors):
        if found is not None:
            raise error or type(found)(f"on rank {rank}: {found}")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
