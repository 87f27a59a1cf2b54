"""What the CPU allocator hands out and takes back, in order: for any engine, in the same way.

Torch's profiler sees each request, whoever makes it: operators, resized storages, copies that a
collective makes for itself. The engine's mappings (`vescale_fsdp.dbuffer.memory`) go around the
allocator; `through_the_allocator` switches them off, and the same regions ask it for the same
bytes. Slabs that wait in the engine's pool count as used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from vescale_fsdp.dbuffer import memory

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


@dataclass
class Block:
    """Memory from a request until it is given back; times in nanoseconds.

    Attributes:
        end: None if it is still there.
    """

    address: int
    num_bytes: int
    start: int
    end: int | None = None
    is_scratch: bool = False  # of a matrix product, which in bf16 may need a copy in fp32


def through_the_allocator() -> AbstractContextManager[object]:
    """A context in which the engine's new regions come from the CPU allocator."""
    return mock.patch.object(memory, "CAN_MAP", False)


def traced(run: Callable[[], object]) -> list[Block]:
    """Call ``run``; all memory that was requested meanwhile, without what products need.

    On gloo its threads may let go of a collective's copies late: have ``run`` wait for that.
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
        elif fields.ptr in live:  # what was there before is not counted
            block, requester = live.pop(fields.ptr)
            block.end = time
            block.is_scratch = parent is requester and getattr(parent, "name", "") in PRODUCTS
    return [block for block in blocks if not block.is_scratch]


def peak_of(blocks: Iterable[Block]) -> tuple[int, Counter[int]]:
    """The most bytes there at a time, and how many blocks of each size they are."""
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
