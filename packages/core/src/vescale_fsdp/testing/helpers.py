"""Helpers for tests on several ranks, and a record of the CPU allocator's requests.

Torch's profiler sees every request to the allocator: of operators, of resized storages, and of
copies inside collectives. So all engines are measured in the same way. Our engine maps memory
itself (`vescale_fsdp.dbuffer.memory`), which bypasses the allocator. `through_the_allocator`
switches that off: the same regions then request the same bytes from the allocator. Free slabs in
the engine's pool count as used.
"""

from __future__ import annotations

import socket
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from vescale_fsdp.compat import pytree
from vescale_fsdp.dbuffer import SlabPool


def assert_equal_across_ranks(value: Any, name: str = "value") -> None:
    """Assert, inside a rank, that ``value`` is the same on all ranks, without a tolerance.

    Every rank must call it. ``value`` may nest lists, tuples, dicts and dataclasses known to
    pytree. Tensors must be plain ones: call ``full_tensor()`` first. NaN equals NaN.

    Cost: one all-gather of ``value``, pickled.

    Raises:
        AssertionError: on every rank. It names the first rank that differs from rank 0, and the
            first leaf that differs there.
    """
    leaves = [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(value)[0]]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, leaves)
    for rank, theirs in enumerate(gathered[1:], start=1):
        paths, expected_paths = [p for p, _ in theirs], [p for p, _ in gathered[0]]
        assert paths == expected_paths, (
            f"{name} has another structure on rank {rank} than on rank 0: "
            f"{paths} against {expected_paths}"
        )
        for (path, leaf), (_, expected) in zip(theirs, gathered[0], strict=True):
            difference = _difference(leaf, expected)
            assert not difference, f"{name}{path} differs on rank {rank} from rank 0: {difference}"


def _difference(found: Any, expected: Any) -> str:
    """A text that says what differs; empty if nothing does."""
    if not (isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return "" if found == expected else f"{found!r} against {expected!r}"
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return (
            f"{found.dtype} {tuple(found.shape)} against {expected.dtype} {tuple(expected.shape)}"
        )
    both_nan = found.isnan() & expected.isnan()
    unequal = (found != expected) & ~both_nan
    count = int(unequal.sum())
    if not count:
        return ""
    largest = (found.double() - expected.double()).abs()[unequal].max().item()
    return f"{count} of {found.numel()} elements, by up to {largest:g}"


def free_port() -> int:
    """A TCP port of the loopback address that was free a moment ago.

    Another process can take it before you do, so prefer a file rendezvous if you can.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


@dataclass
class Block:
    """A block of memory, from its allocation to its release. Times are in nanoseconds.

    Attributes:
        end: the time of the release; None if it is still allocated.
    """

    address: int
    num_bytes: int
    start: int
    end: int | None = None
    is_scratch: bool = False  # of a matrix product, which in bf16 may need a copy in fp32


def through_the_allocator() -> AbstractContextManager[object]:
    """A context in which new engines take all of their memory from torch's CPU allocator.

    They get pools of their own: those of the process may have regions that bypass it.
    """
    pools = weakref.WeakValueDictionary[torch.device, SlabPool]()
    return mock.patch.multiple("vescale_fsdp.dbuffer.memory", CAN_MAP=False, _POOLS=pools)


def traced(run: Callable[[], object]) -> list[Block]:
    """Call ``run``, and return the blocks that were allocated meanwhile.

    Scratch memory of matrix products is left out. Gloo's threads may free the copies of a
    collective late, so ``run`` should wait for that.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    results = prof.profiler.kineto_results
    assert results is not None, "the profiler has stopped"
    requests: list[tuple[int, Any, Any]] = []
    pending = [(event, None) for event in results.experimental_event_tree()]
    while pending:
        event, parent = pending.pop()
        if event.tag.name == "Allocation":
            requests.append((event.start_time_ns, event.extra_fields, parent))
        pending += [(child, event) for child in event.children]
    blocks: list[Block] = []
    live: dict[int, tuple[Block, Any]] = {}
    for time, fields, parent in sorted(requests, key=lambda each: each[0]):
        if fields.alloc_size > 0:
            block = Block(fields.ptr, fields.alloc_size, time)
            live[fields.ptr] = block, parent
            blocks.append(block)
        elif fields.ptr in live:  # blocks that were allocated before `run` are not counted
            block, requester = live.pop(fields.ptr)
            block.end = time
            block.is_scratch = parent is requester and getattr(parent, "name", "") in PRODUCTS
    return [block for block in blocks if not block.is_scratch]


def peak_of(blocks: Iterable[Block]) -> tuple[int, Counter[int]]:
    """The largest number of bytes at a time, and the number of blocks of each size then."""
    changes = [(block.start, 1, block) for block in blocks]
    changes += [(block.end, -1, block) for block in blocks if block.end is not None]
    now = best = 0
    live: Counter[int] = Counter()
    at_peak: Counter[int] = Counter()
    for _, sign, block in sorted(changes, key=lambda each: each[:2]):
        now += sign * block.num_bytes
        live[block.num_bytes] += sign
        if now > best:
            best, at_peak = now, +live
    return best, at_peak
