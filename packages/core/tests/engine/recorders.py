"""Dispatch modes that write down what an engine does: its copies and its collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale_fsdp.dbuffer.transport import SHORTEST_BYTES
from vescale_fsdp.engine.unit import Unit, unit_of

COPYING = {"copy_", "_foreach_copy_", "clone", "cat", "stack", "split_with_sizes_copy", "_to_copy"}
GATHERS = {"_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"}
REDUCTIONS = {"_reduce_scatter_base_", "reduce_scatter_", "alltoall_base_", "allreduce_"}


@dataclass
class Event:
    """A collective that was issued, or a mark that a test made."""

    name: str
    is_async: bool = False
    num_copied: int = 0  # elements that were copied before it

    @property
    def is_gather(self) -> bool:
        return self.name in GATHERS

    @property
    def is_reduction(self) -> bool:
        return self.name in REDUCTIONS


class Recorder(TorchDispatchMode):
    """Counts operators and copied elements, and lists collectives in the order of issue.

    Attributes:
        num_operators: all operators but collectives and views.
        num_copied: elements that copying operators wrote.
        events: collectives, and what ``mark`` put between them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = 0
        self.num_copied = 0
        self.events: list[Event] = []

    def mark(self, name: str) -> None:
        self.events.append(Event(name))

    def count(self, kind: str) -> int:
        """How many ``gathers`` or ``reductions`` were issued."""
        if kind == "gathers":
            return sum(event.is_gather for event in self.events)
        assert kind == "reductions", kind
        return sum(event.is_reduction for event in self.events)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")
        if name[0] == "c10d":
            if not _says_what_was_used(name[1], args):
                is_async = _is_async(func, args, kwargs)
                self.events.append(Event(name[1], is_async, self.num_copied))
            return func(*args, **kwargs)
        if not func.is_view:
            self.num_operators += 1
        result = func(*args, **kwargs)
        if name[1] in COPYING or name[0] == "fsdp":
            written = args[0] if name[1] in ("copy_", "_foreach_copy_") else result
            tensors = [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
            self.num_copied += sum(tensor.numel() for tensor in tensors)
        return result


def _says_what_was_used(name: str, args: tuple[Any, ...]) -> bool:
    """Whether this is a message of `Flags`: all others of so few bytes go by collectives."""
    return name in ("send", "recv_") and args[0][0].nbytes < SHORTEST_BYTES


def _is_async(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("async_op", "asyncOp"):
            return bool(args[index] if index < len(args) else kwargs.get(argument.name, True))
    return False


class Timeline(TorchDispatchMode):
    """Writes down in words what happens to the units of a model, in order.

    ``gather a``, ``reduce a`` and ``sum a`` (over replicas): a collective of unit a was issued.
    ``free a``: the memory of its gathered parameters has gone (FSDP2's is not looked at). All
    else is what `mark` wrote.

    Args:
        units: the modules of the units by name.
        sizes: elements of each unit, by which its collectives are told: no two may be equal.
        num_shards: of each unit.
    """

    current: ClassVar[Timeline | None] = None  # that is entered now
    WORDS: ClassVar = {
        "_allgather_base_": ("gather", 0),
        "_reduce_scatter_base_": ("reduce", 1),
        "alltoall_base_": ("reduce", 1),
        "allreduce_": ("sum", 0),
    }  # and the position of the argument that has the unit's size

    def __init__(
        self, units: Mapping[str, nn.Module], sizes: Mapping[str, int], num_shards: int
    ) -> None:
        super().__init__()
        self.events: list[str] = []
        self._names = {size: name for name, size in sizes.items()}
        assert len(self._names) == len(sizes), "units are told by their sizes"
        self._num_shards = num_shards
        found = {name: unit_of(module) for name, module in units.items()}
        self._units = {name: unit for name, unit in found.items() if unit is not None}
        self._in_memory = self._find_in_memory()

    def __enter__(self) -> Timeline:
        Timeline.current = self
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        Timeline.current = None

    def write(self, event: str) -> None:
        self._look_for_freed()
        self.events.append(event)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d" and not _says_what_was_used(name, args):
            word, position = self.WORDS.get(name, (name, 0))
            (tensor,) = tree_leaves(args[position])
            size = tensor.numel() * (self._num_shards if word == "sum" else 1)
            self.write(f"{word} {self._names.get(size, size)}")
        else:
            self._look_for_freed()
        return func(*args, **(kwargs or {}))

    def _look_for_freed(self) -> None:
        now = self._find_in_memory()
        self.events += [f"free {name}" for name in self._units if self._in_memory[name] > now[name]]
        self._in_memory = now

    def _find_in_memory(self) -> dict[str, bool]:
        return {name: _is_in_memory(unit) for name, unit in self._units.items()}


def mark(event: str) -> None:
    """Write ``event`` on the timeline that is entered, if one is."""
    if Timeline.current is not None:
        Timeline.current.write(event)


def _is_in_memory(unit: Unit) -> bool:
    return any(group.buffer.full.is_materialized for group in unit.groups)
