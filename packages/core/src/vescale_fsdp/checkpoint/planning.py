"""Decides what each rank writes: tensors with DCP's planner, each distinct value by one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from vescale_fsdp.checkpoint import encoding
from vescale_fsdp.checkpoint.contents import Contents
from vescale_fsdp.checkpoint.manifest import DTYPES
from vescale_fsdp.errors import CheckpointMismatchError

# An offer has the boxes of a rank as [name, offsets, sizes, dtype, shape, is a shard], and its
# values as {name: digest}. A task has the numbers of the boxes that the rank writes, and the values
# that it writes as {name: ranks that have the same}.
Offer = dict[str, Any]
Task = dict[str, Any]


class Piece(NamedTuple):
    """A box of a tensor of the model or an optimizer. ``data`` is a view."""

    name: str
    data: torch.Tensor
    shape: tuple[int, ...]  # of the full tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class LocalPlan:
    """This rank's part of a save."""

    def __init__(self, contents: Contents, is_first: bool) -> None:
        self._planner = DefaultSavePlanner(flatten_state_dict=False)
        self._planner.set_up_planner(contents.planned, is_coordinator=is_first)
        self._items = self._planner.create_local_plan().items
        self._contents = contents

    def offer(self) -> Offer:
        """Return what this rank can write, as JSON."""
        digests = {name: _digest(text) for name, text in self._contents.texts.items()}
        digests |= {name: item.digest() for name, item in self._contents.own.items()}
        return {"boxes": [_box(item) for item in self._items], "values": digests}

    def chosen(self, task: Task) -> Iterator[Piece]:
        """Yield the boxes that this rank writes."""
        for number in task["boxes"]:
            item = self._items[number]
            assert item.tensor_data is not None, "bytes are not planned here"
            name, shape = item.index.fqn, item.tensor_data.size
            offsets, sizes = item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes
            found = self._planner.resolve_data(item)
            assert isinstance(found, torch.Tensor), "bytes are not planned here"
            if found.shape != sizes:
                raise CheckpointMismatchError(
                    f"{name!r} of shape {list(shape)} should have {list(sizes)} on this rank, as "
                    f"its placements say, but has {list(found.shape)}; was it made by from_local() "
                    "with another placement?"
                )
            yield Piece(name, found, tuple(shape), tuple(offsets), tuple(sizes))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _box(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None, "bytes are not planned here"
    dtype, is_shard = encoding.dtype_name(data.properties.dtype), item.type is WriteItemType.SHARD
    offsets, sizes = list(data.chunk.offsets), list(data.chunk.sizes)
    return [item.index.fqn, offsets, sizes, dtype, list(data.size), is_shard]


def _item(name: str, offsets: Any, sizes: Any, dtype: str, shape: Any, shard: bool) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    properties = TensorProperties(dtype=DTYPES[dtype])
    kind = WriteItemType.SHARD if shard else WriteItemType.TENSOR
    data = TensorWriteData(chunk, properties, torch.Size(shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=data)


def divide(offers: Sequence[Offer]) -> list[Task]:
    """Return the task of each rank. Each box is written once.

    If several ranks have it, the one with the fewest bytes to write does it.
    """
    _check_agreement(offers)
    plans = [SavePlan([_item(*box) for box in offer["boxes"]]) for offer in offers]
    try:
        final, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    except ValueError as error:
        raise CheckpointMismatchError(
            f"the ranks do not hold all of each tensor: {error}"
        ) from error
    tasks: list[Task] = []
    for before, after in zip(plans, final, strict=True):
        numbers = {item.index: number for number, item in enumerate(before.items)}
        tasks.append({"boxes": sorted(numbers[item.index] for item in after.items), "values": {}})
    for name, ranks in _variants(offers):
        tasks[ranks[0]]["values"].setdefault(name, ranks)
    shared = [name for task in tasks for name in task["values"]]
    several = sorted(name for name in set(shared) if shared.count(name) > 1)
    return [{**task, "several": several} for task in tasks]


def _check_agreement(offers: Sequence[Offer]) -> None:
    first: dict[str, tuple[int, Any]] = {}
    for rank, offer in enumerate(offers):
        for name, _, _, dtype, shape, _ in offer["boxes"]:
            other, expected = first.setdefault(name, (rank, (dtype, shape)))
            if (dtype, shape) != expected:
                raise CheckpointMismatchError(
                    f"{name!r} is {dtype} {shape} on rank {rank}, and {expected[0]} {expected[1]} "
                    f"on rank {other}; ranks must save the same model"
                )


def _variants(offers: Sequence[Offer]) -> list[tuple[str, list[int]]]:
    """Return each distinct value with the ranks that have it. ``extra`` is rank 0's."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, offer in enumerate(offers):
        for name, digest in offer["values"].items():
            if name != "extra":
                found.setdefault((name, digest), []).append(rank)
    variants = [(name, ranks) for (name, _), ranks in found.items()]
    return [*variants, ("extra", list(range(len(offers))))]
