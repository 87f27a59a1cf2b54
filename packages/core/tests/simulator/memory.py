"""What the caching allocator does with addresses: a model of c10's for CUDA.

Blocks are cut from segments. A segment belongs to the stream that was current when it was made;
what is freed goes back to it at once, whatever runs. Sizes are rounded as c10 does
(2.13, `c10/cuda/CUDACachingAllocator.cpp`): to 512 bytes; requests up to 1 MiB are cut from
segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones have segments of their own, in
steps of 2 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_MIN = 512
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
_MIN_LARGE, _LARGE_SEGMENT = 10 << 20, 20 << 20
_ROUND_LARGE = 2 << 20


@dataclass(eq=False)
class Block:
    """A stretch of the arena, free or taken."""

    offset: int
    size: int
    pool: tuple[Any, ...]
    is_free: bool = False
    before: Block | None = None  # in the same segment
    after: Block | None = None
    users: list[Any] = field(default_factory=list)  # streams that were told to `record_stream`


class Allocator:
    """Addresses, and how much of them is in use.

    Args:
        as_cuda: cut and join blocks as c10 does, and take that of the lowest address. Else each
            size has blocks of its own, and the one that was freed last is taken: whoever still
            uses it is found out.

    Attributes:
        allocated, reserved: bytes now; with ``peak_`` before, the most there was.
        num_reused: allocations that were given memory which had been freed.
    """

    def __init__(self, num_bytes: int, *, as_cuda: bool = False) -> None:
        self._size, self._top, self._as_cuda = num_bytes, 0, as_cuda
        self._free: dict[tuple[Any, ...], list[Block]] = {}
        self._late: list[tuple[Block, list[Any]]] = []  # freed, and events to come before
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.num_reused = 0

    def take(self, num_bytes: int, stream: Any) -> Block:
        """A block for ``stream``: the smallest that fits."""
        self._free_late()
        size = -(-max(num_bytes, 1) // _MIN) * _MIN
        is_small = size <= _SMALL
        pool = (stream, is_small)
        if not self._as_cuda:
            pool = (stream, size)
        fitting = [block for block in self._free.get(pool, []) if block.size >= size]
        if fitting:
            block = min(fitting, key=lambda b: (b.size, b.offset)) if self._as_cuda else fitting[-1]
            self._free[pool].remove(block)
            block.is_free = False
            self.num_reused += 1
        else:
            block = self._new_segment(size, pool)
        rest = block.size - size
        if not rest:
            pass
        elif rest >= _MIN if is_small else rest > _SMALL:
            self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free_of(self, stream: Any) -> list[Block]:
        """The free blocks of a stream."""
        self._free_late()
        return [
            block for pool, blocks in self._free.items() if pool[0] is stream for block in blocks
        ]

    def _new_segment(self, size: int, pool: tuple[Any, ...]) -> Block:
        num_bytes = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        if not self._as_cuda:
            num_bytes = size
        elif size <= _SMALL:
            num_bytes = _SMALL_SEGMENT
        elif size < _MIN_LARGE:
            num_bytes = _LARGE_SEGMENT
        block = Block(self._top, num_bytes, pool)
        self._top += num_bytes
        assert self._top <= self._size, "the arena is full"
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.offset + size, block.size - size, block.pool, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._free.setdefault(block.pool, []).append(rest)

    def give(self, block: Block) -> None:
        """Free it; where other streams were recorded, when they are through."""
        if block.is_free:
            return
        if block.users:
            events = [stream.record_event() for stream in block.users]
            block.users = []
            self._late.append((block, events))
            return
        self.allocated -= block.size
        block.is_free = True
        free = self._free.setdefault(block.pool, [])
        for near in (block.before, block.after):
            if near is not None and near.is_free:
                free.remove(near)
        if block.after is not None and block.after.is_free:
            block.size += block.after.size
            block.after = block.after.after
            if block.after is not None:
                block.after.before = block
        if block.before is not None and block.before.is_free:
            block.before.size += block.size
            block.before.after = block.after
            if block.after is not None:
                block.after.before = block.before
            block = block.before
        free.append(block)

    def drop_free_segments(self) -> None:
        """As ``torch.cuda.empty_cache()``; what is reserved counts anew from here."""
        for pool, blocks in self._free.items():
            whole = [each for each in blocks if each.before is None and each.after is None]
            self._free[pool] = [each for each in blocks if each not in whole]
            self.reserved -= sum(each.size for each in whole)
        self.peak_reserved = self.reserved

    def _free_late(self) -> None:
        for block, events in list(self._late):
            if all(event.query() for event in events):
                self._late.remove((block, events))
                self.give(block)
