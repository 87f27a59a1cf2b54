"""The memory that a call takes from torch's CPU allocator: its blocks, and their peak.

Torch's profiler sees every request to the allocator: of operators, of resized storages, and of
copies inside collectives. So all engines are measured in the same way. Our engine maps memory
itself (`vescale_fsdp.dbuffer.memory`), which bypasses the allocator. `through_the_allocator`
switches that off: the same regions then request the same bytes from the allocator. Free slabs in
the engine's pool count as used.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from vescale_fsdp.dbuffer import SlabPool

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
