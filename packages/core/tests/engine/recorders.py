"""Dispatch modes that write down what an engine does: its copies and its collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def _is_async(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("async_op", "asyncOp"):
            return bool(args[index] if index < len(args) else kwargs.get(argument.name, True))
    return False
