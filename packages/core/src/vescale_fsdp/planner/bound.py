"""A shard size that no order of the tensors can beat.

Whatever the order, S must hold the average (m S >= sum of sizes), and each tensor must have a
legal start by itself: it fits in a shard, or it crosses one cut, which leaves it at most S after
the cut and the whole blocks of S before it, or its block divides S. The least S with this is
found by the same branch and bound as for a given order, over the distinct (size, block) only, so
it costs next to nothing: hundreds of equal experts are one case.

Example: 13 elements in blocks of 5 over 4 shards. S = 4 holds no block; S = 5 is divided by 5,
so 5 is the bound, and 6 would be refused: 5 before a cut leave 8 after it.

The bound is often met, so it tells that a plan cannot be improved. It knows nothing of how
tensors share a shard: where shards are small against blocks, the least S may be above it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from vescale_fsdp.planner.search import Item, Search

# Looked-at (size, block) pairs before the search is broken off: some 10 ms in CPython.
_WORK_LIMIT = 50_000


class Bound(NamedTuple):
    """No order has a smaller ``shard_size``, in units.

    ``multiple`` divides it: the least common multiple of blocks that had to. Where S is a bit
    larger, it mostly has to be a multiple of that as well.
    """

    shard_size: int
    multiple: int


def lower_bound(items: Sequence[Item], num_shards: int) -> Bound:
    """The least shard size that the average and each item by itself allow."""
    search = _EachAlone(items, num_shards)
    low = -(-search.total // num_shards)
    if low == 0:
        return Bound(0, 1)
    nodes, _ = search.branch(low, _WORK_LIMIT)
    return Bound(nodes[0].bound, nodes[0].multiple)


class _EachAlone(Search):
    """The relaxation in which tensors share the shards but do not get in each other's way."""

    def __init__(self, items: Sequence[Item], num_shards: int) -> None:
        super().__init__(items, num_shards)
        self.kinds = sorted({item for item in items if item.size and item.block > 1}, reverse=True)

    def fits(self, shard_size: int, barred: Set[int]) -> bool:
        """Whether the shards hold the sum, and each item has a legal start, alone."""
        self.work += len(self.kinds)
        if self.total > self.num_shards * shard_size:
            return False
        for size, block in self.kinds:
            if size <= shard_size:
                break  # so do the rest, which are smaller
            before_cut = shard_size - shard_size % block
            may_span = block not in barred
            if before_cut == 0 or not (may_span or size - before_cut <= shard_size):
                return False
        return True

    def offender(self, shard_size: int, barred: Set[int]) -> int | None:
        """The block of the largest item that has to span though its block does not divide S."""
        self.work += len(self.kinds)
        for size, block in self.kinds:
            remainder = shard_size % block
            if remainder and size > shard_size + (shard_size - remainder):
                return block
        return None
