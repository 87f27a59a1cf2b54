"""export_dcp: a directory that stock FSDP2 loads with torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale_fsdp import compat
from vescale_fsdp.checkpoint.dcp.directory import METADATA
from vescale_fsdp.checkpoint.dcp.files import StockWriter, write_metadata
from vescale_fsdp.checkpoint.disk.manifest import Chunk, Span, TensorEntry
from vescale_fsdp.checkpoint.sealed.staged import export
from vescale_fsdp.checkpoint.state import tensors, values
from vescale_fsdp.checkpoint.state.contents import (
    Contents,
    Optimizers,
    Weights,
    named,
    weights_of,
)
from vescale_fsdp.checkpoint.state.optimizer import NamedOptimizer
from vescale_fsdp.checkpoint.transfer.planning import LocalPlan, Task
from vescale_fsdp.checkpoint.transfer.ranks import all_ranks
from vescale_fsdp.errors import CheckpointValueError


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

        state = {"model": get_model_state_dict(model),
                 "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])

    As stock does, it wants states of all parameters: those that never had a gradient have none
    (``DefaultLoadPlanner(allow_partial_load=True)``). Keys of states become texts.

    Args:
        path: of the directory; must not exist. The same on every rank, on a file system that all
            of them share.
        model: sharded or not.
        optimizer: one, or a mapping; the states of several go together, as
            ``get_optimizer_state_dict(model, optimizers)`` has them.
        extra: the first rank's plain values, beside the model: ``{"step": 100}``.
        model_key: what the model's keys begin with; dots nest: "app.model".
        optimizer_key: the same for the optimizer.
        weights: of the model: "all"; "trained", without what is frozen; or "none", for the
            optimizer alone.

    Cost: as a `save`; memory for one box of a tensor twice.

    Raises:
        CheckpointExistsError: there is something at ``path``. Nothing is ever overwritten.
        CheckpointValueError: a state holds what is no plain data, by name.
        CheckpointMismatchError: ranks hold different models.
        CheckpointWriteError: disk full, no permission, no folder that all ranks share.
        CheckpointIncompleteError: another rank has died.

    After an error nothing is left behind.
    """
    exporting = _Export(model, optimizer, extra, model_key, optimizer_key, weights)
    export(
        Path(path),
        exporting.collect,
        lambda stage, offers: [None] * len(offers),
        exporting.write,
        exporting.finish,
        options=[model_key, optimizer_key],
    )


class _Export:
    """One export, on one rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        extra: Mapping[str, Any] | None,
        model_key: str,
        optimizer_key: str,
        weights: Weights,
    ) -> None:
        self._weights = weights
        self._model, self._optimizers = model, named(optimizer)
        self._rank = all_ranks().rank
        self._extra = {} if self._rank else dict(extra or {})
        self._keys = model_key, optimizer_key
        self._flat: dict[str, Any] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}

    def collect(self) -> Contents:
        """What this rank holds, by DCP's keys."""
        state = self._extra
        of_model = weights_of(self._model, self._weights)
        if of_model:
            nest(state, self._keys[0], of_model)
        if self._optimizers:
            trees = [NamedOptimizer(n, o, self._model).tree() for n, o in self._optimizers.items()]
            nest(state, self._keys[1], merged(trees))
        self._flat, self._paths = flat_state(state)
        held = {key: each for key, each in self._flat.items() if isinstance(each, torch.Tensor)}
        for key, each in held.items():
            tensors.check(each, key)
        # Of several ranks that have a value, the first one writes it.
        return Contents(planned=held, texts=dict.fromkeys(self._flat.keys() - held.keys(), ""))

    def write(self, stage: Path, plan: LocalPlan, task: Task) -> Any:
        """Write this rank's part. Returns what the metadata say of it."""
        writer = StockWriter(stage, self._rank)
        boxes, others = [], []
        try:
            for number in task["boxes"]:
                item = plan.items[number]
                assert item.tensor_data is not None, "bytes are not planned"
                key, chunk, data = item.index.fqn, item.tensor_data.chunk, plan.data(item)
                span = writer.write(data, f"tensor {key!r}")
                tensor = [tensors.dtype_name(data.dtype), item.tensor_data.size]
                boxes.append([self._paths[key], *tensor, chunk.offsets, chunk.sizes, astuple(span)])
            for key in sorted(task["values"].keys() & self._flat.keys()):
                span = writer.write(self._flat[key], f"value {key!r}")
                others.append([self._paths[key], astuple(span)])
            writer.finish()
        finally:
            writer.abandon()
        return {"boxes": boxes, "values": others}

    def finish(self, stage: Path, written: list[Any]) -> list[str]:
        """Write the metadata. Returns the names of all files."""
        found: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
        others: dict[str, Span] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        files: set[str] = set()
        for part in written:
            for path, dtype, shape, offsets, sizes, span in part["boxes"]:
                key = ".".join(map(str, path))
                paths[key] = tuple(path)
                chunks = found.setdefault(key, (dtype, tuple(shape), []))[2]
                chunks.append(Chunk(tuple(offsets), tuple(sizes), Span(*span)))
                files.add(span[0])
            for path, span in part["values"]:
                key = ".".join(map(str, path))
                if key not in others:
                    paths[key], others[key] = tuple(path), Span(*span)
                    files.add(span[0])
        entries = {key: TensorEntry(d, shape, tuple(c)) for key, (d, shape, c) in found.items()}
        write_metadata(stage, entries, others, paths)
        return [*sorted(files), METADATA]


def merged(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """States and options of several optimizers together.

    Raises:
        CheckpointValueError: two have states of the same parameter.
    """
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


def nest(state: dict[str, Any], key: str, value: dict[str, Any]) -> None:
    """Put a value under a key whose dots nest; with "" beside the others."""
    for part in key.split(".") if key else ():
        state = state.setdefault(part, {})
    state |= value


def flat_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Tensors and plain values by DCP's keys, and the path of each key.

    Raises:
        CheckpointValueError: a value is more than plain data, or two have the same key.
    """
    try:
        flat, paths = compat.flattened(state)
    except ValueError as error:
        raise CheckpointValueError(f"the state cannot be flattened: {error}") from error
    for key, each in flat.items():
        _, inner = values.encode(each, key)
        if inner and not isinstance(each, torch.Tensor):
            raise CheckpointValueError(
                f"{key!r} has tensors within a {type(each).__name__}; put them into a list or dict"
            )
    return flat, paths
