"""The communication of a step: counts it, computes it from the layout, and replays it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from vescale_fsdp.dbuffer import BlockCodec, Coding
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.planner import ShardLayout

__all__ = ["Collective", "Recorder", "Replay", "bytes_by_layout", "gap_bytes"]

_GAP_BYTES = 16
IN_FLIGHT = 2  # per communicator, in a replay: gloo has two threads for each


@dataclass(frozen=True)
class Collective:
    """A collective that an engine has issued.

    Attributes:
        name: of the operator, as ``_allgather_base_``.
        num_bytes: of the full buffer: the output of an all-gather, the input of a reduce-scatter.
            Of a message between two ranks, its size.
        call: the operator and its arguments, to issue it again.
    """

    name: str
    num_bytes: int
    call: tuple[Any, tuple[Any, ...], dict[str, Any]]

    def sent_bytes(self, num_ranks: int) -> float:
        """Return the bytes that one rank sends on gloo, without headers.

        An all-gather or all-to-all sends each part once to each other rank. An all-reduce sends
        twice as much, in a ring. So does gloo's reduce-scatter, which is an all-reduce internally.
        """
        if self.name in ("send", "recv_"):
            return self.num_bytes if self.name == "send" else 0
        twice = self.name in ("allreduce_", "_reduce_scatter_base_")
        return (2 if twice else 1) * self.num_bytes * (num_ranks - 1) / num_ranks


class Recorder(TorchDispatchMode):
    """Records the collectives of a step. (On CPU, backward runs in the calling thread.)

    Args:
        keeps_calls: keep calls and their tensors for a `Replay`, which needs their memory.
    """

    NAMES = (
        "_allgather_base_", "alltoall_base_", "allreduce_", "_reduce_scatter_base_", "send", "recv_"
    )  # fmt: skip

    def __init__(self, *, keeps_calls: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps_calls = keeps_calls
        self.collectives: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for every operator."""
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d" and name in self.NAMES:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            largest = max(tensor.numel() * tensor.itemsize for tensor in tensors)
            blank = tree_map(_blank, args) if self._keeps_calls else ()
            self.collectives.append(Collective(name, largest, (func, blank, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _blank(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


class Replay:
    """Issues recorded collectives again, two at a time on each communicator."""

    def __init__(self, collectives: list[Collective]) -> None:
        self._calls = [each.call for each in collectives]

    def step(self) -> None:
        """Issue all of them once."""
        flying: dict[str, deque[Any]] = {}
        for func, args, kwargs in self._calls:
            boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
            queue = flying.setdefault(group.group_name, deque())
            is_part = func._schema.name in ("c10d::send", "c10d::recv_")
            calls = 2 * (group.size() - 1) if is_part else 1  # that make up one of our collectives
            while len(queue) >= IN_FLIGHT * calls:
                queue.popleft().wait()
            result = func(*args, **kwargs)  # an all-to-all gives its work alone
            queue.append(dist.Work.unbox(result[-1] if isinstance(result, tuple) else result))
        for queue in flying.values():
            for work in queue:
                work.wait()


def bytes_by_layout(model: nn.Module, num_ranks: int) -> int:
    """Compute the bytes that one rank sends in a step of ours, without headers.

    A unit is gathered in forward in the compute dtype, and again in backward, except for the root
    and the last ``in_flight - 2`` units, which stay unsharded, and the rows of the table that keep
    parameters. Gradients are sent once in the same dtype. Each time a rank sends its part to all
    others: ``(num_ranks - 1) * shard_size`` elements, or a message of its codec. With
    ``sharding="ddp"`` nothing is gathered, and gradients are all-reduced, in a ring. The gaps of
    `gap_bytes` are not included.
    """
    total = 0
    units = list(units_in(model).values())
    released = [unit for unit in units if not unit.keeps_after_forward(wants_gradients=True)]
    assert units[0] not in released, "a backward would gather a root first"
    twice = released[: len(released) - max(units[0].in_flight - 2, 0)]
    for unit in units:
        num_gathers = 2 if unit in twice else 1
        for group in unit.groups:
            layout, compute_dtype = group.layout, group.buffer.full_dtype
            if group.axes.shard is None:
                whole = layout.shard_size * group.gradients.sum_dtype.itemsize
                total += group.trainable * 2 * whole * (num_ranks - 1) // num_ranks
                continue
            gathers, reductions = zip(*group.codings, strict=True)
            gathered = _part_bytes(layout, gathers, compute_dtype, compute_dtype)
            reduced = _part_bytes(layout, reductions, compute_dtype, group.gradients.sum_dtype)
            total += (num_ranks - 1) * (num_gathers * gathered + group.trainable * reduced)
    return total


def gap_bytes(model: nn.Module) -> int:
    """Compute the most bytes of gaps that one rank sends in a step of ours.

    On the CPU the parts of small groups are sent in one message (`vescale_fsdp.dbuffer.message`).
    In it each part of an all-gather is followed by less than 16 bytes, each part of a reduction by
    at most 16, which no plan contains.
    """
    groups = [group for unit in units_in(model).values() for group in unit.groups]
    sharded = [group for group in groups if group.axes.shard is not None]
    messages = 3  # two all-gathers, one reduction
    return sum(messages * _GAP_BYTES * (group.axes.num_shards - 1) for group in sharded)


def _part_bytes(
    layout: ShardLayout,
    codings: Sequence[Coding | None],
    dtype: torch.dtype,
    raw_dtype: torch.dtype,
) -> int:
    """Return the bytes that a rank sends to each other one: its part in ``dtype``, or a message."""
    if any(codings):
        return BlockCodec(layout, codings, raw_dtype).num_bytes(layout)
    return layout.shard_size * dtype.itemsize
