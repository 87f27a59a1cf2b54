"""The contents of a checkpoint, tensors by name and values as JSON texts; and who writes what.

There are three kinds of items:

* ``model``, ``optimizer.<name>``: all ranks together. Tensors are sharded, or the same on the ranks
  that have them.
* ``extra``: from rank 0 only.
* ``rng``, ``stateful.<name>``, ``error_feedback``: each rank has its own. If several ranks have the
  same, it is saved once. ``rng`` has the states of Python's, NumPy's, torch's and CUDA's random
  number generators.

DCP's planner decides which rank writes which part of a tensor. Each distinct value is written by
one rank. Buffers may differ between ranks: statistics of BatchNorm, which with
``broadcast_buffers`` are the first rank's. So all buffers are written by the first rank.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale_fsdp import compat, devices, transfers
from vescale_fsdp.checkpoint import encoding
from vescale_fsdp.checkpoint.files import bytes_of
from vescale_fsdp.checkpoint.manifest import DTYPES, to_json
from vescale_fsdp.checkpoint.optimizer import NamedOptimizer
from vescale_fsdp.engine import ErrorFeedback
from vescale_fsdp.errors import CheckpointMismatchError, CheckpointValueError

Optimizers = Optimizer | Mapping[str, Optimizer] | None
# "trained": without frozen parameters. A mapping is the state dict, as a hook has changed it.
Weights = Literal["all", "trained", "none"] | Mapping[str, Any]
PER_RANK = ("error_feedback", "rng", "stateful")  # each rank has its own


class Stateful(Protocol):
    """An object with these two methods: a scheduler, a data loader, a moving average."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in types that `encoding.encode` accepts."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Set the state."""


@dataclass
class OwnItem:
    """A value of which each rank has its own."""

    text: str
    tensors: dict[str, torch.Tensor]  # by the names in the text; none is sharded

    def digest(self) -> str:
        """Return a SHA-256 of the value, to find ranks that have the same."""
        total = hashlib.sha256(self.text.encode())
        for name, tensor in self.tensors.items():
            data = encoding.on_host(tensor)
            total.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
            total.update(bytes_of(data))
        return total.hexdigest()


@dataclass
class Contents:
    """All items of a rank."""

    planned: dict[str, torch.Tensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # values of model and optimizers
    own: dict[str, OwnItem] = field(default_factory=dict)
    step: int | None = None
    buffers: set[str] = field(default_factory=set)  # names of plain buffers of the model
    _names: set[str] = field(default_factory=set)  # the names of all tensors

    def add(self, name: str, value: Any) -> None:
        """Add an item that all ranks have together: the model or an optimizer."""
        encoded, found = encoding.encode(value, name)
        self._check(name, found)
        self.planned |= found
        self.texts[name] = to_json(encoded)

    def add_own(self, name: str, value: Any) -> None:
        """Add an item of which each rank has its own. DTensors in it are saved as sharded ones."""
        encoded, found = encoding.encode(value, name)
        self._check(name, found)
        plain = {key: each for key, each in found.items() if not isinstance(each, DTensor)}
        self.planned |= {key: each for key, each in found.items() if key not in plain}
        self.own[name] = OwnItem(to_json(encoded), plain)

    def mark_buffers(self, model: nn.Module) -> None:
        """Remember which of the tensors are buffers. Call it when those of the model were added."""
        storages = {each for buffer in model.buffers() for each in compat.storages_of(buffer)}
        self.buffers = {
            name
            for name, tensor in self.planned.items()
            if not isinstance(tensor, DTensor) and compat.storages_of(tensor) & storages
        }

    def _check(self, item: str, found: dict[str, torch.Tensor]) -> None:
        if item in self.texts or item in self.own:
            raise CheckpointValueError(
                f"{item!r} is there twice: names are kept as texts. Give each another name"
            )
        for name, tensor in found.items():
            if name in self._names:
                raise CheckpointValueError(
                    f"two tensors would be called {name!r}, one of them in {item!r}: give one of "
                    "the optimizers or stateful objects another name"
                )
            self._names.add(name)
            if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None:
                encoding.check(tensor, name)


def collect(
    model: nn.Module,
    optimizer: Optimizers,
    extra: Mapping[str, Any] | None,
    stateful: Mapping[str, Stateful],
    with_rng: bool,
    weights: Weights = "all",
) -> Contents:
    """Collect this rank's items. Tensors are not copied."""
    contents = Contents()
    contents.add("model", weights_of(model, weights))  # first: state_dict() reshards parameters
    contents.mark_buffers(model)
    for name, each in named(optimizer).items():
        contents.add(f"optimizer.{name}", NamedOptimizer(name, each, model).tree())
    for name, other in stateful.items():
        contents.add_own(f"stateful.{name}", read_stateful(name, other))
    if optimizer is not None and (feedback := ErrorFeedback(model)):
        contents.add_own("error_feedback", feedback.tensors())
    if with_rng:
        contents.add_own("rng", capture())
    given = dict(extra or {})
    contents.add_own("extra", given)
    step = given.get("step")
    contents.step = step if type(step) is int else None
    return contents


def weights_of(model: nn.Module, weights: Weights) -> dict[str, Any]:
    """Return a model's state dict, or the part that ``weights`` names, or ``weights`` itself."""
    if not isinstance(weights, str):
        return dict(weights)
    state = dict(get_model_state_dict(model))
    if weights == "trained":
        for path, param in model.named_parameters(remove_duplicate=False):  # all names of tied ones
            if not param.requires_grad:
                state.pop(compat.fqn_of(model, path), None)
    return {} if weights == "none" else state


def read_stateful(name: str, other: Stateful) -> dict[str, Any]:
    """Return the state of an object. Raises if it is not a dict."""
    if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
        raise CheckpointValueError(
            f"stateful[{name!r}] is a {type(other).__name__} without state_dict() and "
            "load_state_dict(); give objects that have both, or put values into extra"
        )
    return other.state_dict()


def named(optimizer: Optimizers) -> Mapping[str, Optimizer]:
    """Return optimizers by name. A single one has the name "0"."""
    if optimizer is None:
        return {}
    return {"0": optimizer} if isinstance(optimizer, Optimizer) else optimizer


def capture() -> dict[str, Any]:
    """Return the states, in types that `encoding.encode` accepts. CUDA: of the current device."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = (str(name), keys.tolist(), *map(_plain, rest))
    cuda = devices.generator_state()
    if cuda is not None:
        found["cuda"] = cuda
    return found


def _plain(number: Any) -> int | float:
    return float(number) if isinstance(number, float) else int(number)


def restorer(state: dict[str, Any]) -> Callable[[], None]:
    """Return a function that sets these states. They are first set on temporary generators.

    So a damaged state raises here, and changes nothing. Generators that this process does not have
    (NumPy is not imported, no CUDA) are skipped.
    """
    random.Random().setstate(state["python"])
    torch.Generator().set_state(state["torch"])
    numpy = sys.modules.get("numpy") if "numpy" in state else None
    if numpy is not None:
        numpy.random.RandomState().set_state(state["numpy"])

    def apply() -> None:
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if numpy is not None:
            numpy.random.set_state(state["numpy"])
        if "cuda" in state:
            devices.set_generator_state(state["cuda"])

    return apply


def restore(state: dict[str, Any]) -> None:
    """Set these states."""
    restorer(state)()


def seed_for(text: str) -> Callable[[], None]:
    """Return a function that seeds the generators from a text. Equal texts give equal seeds."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])

    def apply() -> None:
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)

    return apply


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
        self._copies: list[Piece] = []

    def stage(self) -> None:
        """Copy everything to host memory: `chosen` and the contents then have today's values.

        Cost: host memory for all that this rank holds, replicas included. No communication.
        """
        staging = transfers.Staging()
        copies = [
            piece._replace(data=encoding.staged(piece.data, staging))
            for piece in self.chosen({"boxes": range(len(self._items))})
        ]
        for item in self._contents.own.values():
            item.tensors = {n: encoding.staged(t, staging) for n, t in item.tensors.items()}
        staging.wait()
        self._copies = copies
        self._contents.planned.clear()  # they change while the copies are written

    def offer(self) -> Offer:
        """Return what this rank can write, as JSON."""
        texts = self._contents.texts.items()
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts}
        digests |= {name: item.digest() for name, item in self._contents.own.items()}
        boxes, buffers = [_box(item) for item in self._items], sorted(self._contents.buffers)
        return {"boxes": boxes, "values": digests, "buffers": buffers}

    def chosen(self, task: Task) -> Iterator[Piece]:
        """Yield the boxes that this rank writes."""
        for number in task["boxes"]:
            if self._copies:
                yield self._copies[number]
                continue
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


def divide(offers: Sequence[Offer], small: int = 0) -> list[Task]:
    """Return the task of each rank. Each box is written once.

    If several ranks have it, the one with the fewest bytes to write does it; of buffers it is the
    first one.

    Args:
        small: unsharded tensors with up to so many elements are also written by the first rank that
            has them. So a rank that loads finds all of them in one file.
    """
    _check_agreement(offers)
    plans = [SavePlan([_item(*box) for box in offer["boxes"]]) for offer in offers]
    buffers = {name for offer in offers for name in offer["buffers"]}
    try:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        final, _ = planner.create_global_plan(_without_repeated(plans, buffers, small))
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


def _without_repeated(plans: list[SavePlan], buffers: set[str], small: int) -> list[SavePlan]:
    """Leave out buffers, and small unsharded tensors, that an earlier rank has."""
    seen: set[MetadataIndex] = set()
    kept = []
    for plan in plans:
        items = []
        for item in plan.items:
            assert item.tensor_data is not None, "bytes are not planned here"
            is_first = item.index.fqn in buffers or item.tensor_data.size.numel() <= small
            if is_first and item.type is WriteItemType.TENSOR:
                if item.index in seen:
                    continue
                seen.add(item.index)
            items.append(item)
        kept.append(SavePlan(items))
    return kept


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
