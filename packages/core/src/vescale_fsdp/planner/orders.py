"""Which order the tensors lie in: that of definition, or another one that needs less room.

The order of definition is the best one for nearly every model. Only where it stays more than 1%
above what all orders need (``lower_bound``) do others compete. An order that cannot win costs one
look (``solve_below``), the rest are solved exactly, and ties stay with the earlier one:

``definition``  as given.
``by trial``    up to five tensors: whichever of all their orders is best.
``by block``    more tensors: largest blocks first, then largest tensors.
``by size``     largest tensors first, then largest blocks.
``best fit``    built for one shard size by a greedy rule (``fitting``), for a few of them.

Example: a layer with 768 expert matrices over 1,024 ranks, 128 rows to a block. Per rank there are
11.2 million elements; the shard has 7.3% more in the order of definition, 5.0% by block, and 2.6%
by best fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

from vescale_fsdp.planner.bound import lower_bound
from vescale_fsdp.planner.fitting import best_fit
from vescale_fsdp.planner.search import Item
from vescale_fsdp.planner.solve import solve, solve_below

# Other orders are tried where they may save this much. By measurement: below it, they win less
# than 0.5% on the shapes of real models, and the order of definition is easier to live with.
_WORTH = 0.01

# All orders of so many tensors are tried: 120, a few milliseconds.
_MAX_TRIALS = 5

# Placements for each other order, and tensors looked at by the greedy rule for all shard sizes:
# some 20 ms each in CPython. Counted in work, as all ranks must come to the same plan.
_WORK_LIMIT = 100_000
_FITTING_WORK_LIMIT = 50_000

# Shard sizes that the greedy rule tries for each block.
_SIZES_PER_BLOCK = 16


class Choice(NamedTuple):
    """The order to use, and the shard size in units for it."""

    order: tuple[int, ...]  # indices of items, in the order of placement
    name: str
    shard_size: int
    exact: bool  # the least for this order
    optimal: bool  # the least for all orders


def choose_order(items: Sequence[Item], num_shards: int, *, try_others: bool) -> Choice:
    """The best order found, which is that of definition unless another one is strictly better.

    Cost: as ``solve``, and about as much again where other orders compete.
    """
    contest = _Contest(items, num_shards)
    if try_others and contest.best.shard_size > (1 + _WORTH) * contest.bound.shard_size:
        if len(contest.filled) <= _MAX_TRIALS:
            contest.try_all()
        else:
            contest.enter("by block", sorted(contest.filled, key=contest.by_block))
            contest.enter("by size", sorted(contest.filled, key=contest.by_size))
            contest.try_best_fit()
    return contest.best


class _Contest:
    """The orders tried so far, of which the best is kept."""

    def __init__(self, items: Sequence[Item], num_shards: int) -> None:
        self.items = items
        self.num_shards = num_shards
        self.filled = [i for i, item in enumerate(items) if item.size]
        self.empty = [i for i, item in enumerate(items) if not item.size]
        self.bound = lower_bound(items, num_shards)
        least, exact = solve(items, num_shards, low=self.bound.shard_size)
        is_optimal = least == self.bound.shard_size
        self.best = Choice(tuple(range(len(items))), "definition", least, exact, is_optimal)

    def by_block(self, index: int) -> tuple[int, int]:
        return -self.items[index].block, -self.items[index].size

    def by_size(self, index: int) -> tuple[int, int]:
        return -self.items[index].size, -self.items[index].block

    def enter(self, name: str, filled: Sequence[int]) -> None:
        """Let the order ``filled`` of the tensors with elements compete."""
        found = solve_below(
            [self.items[i] for i in filled],
            self.num_shards,
            low=self.bound.shard_size,
            below=self.best.shard_size,
            work_limit=_WORK_LIMIT,
        )
        if found is not None:
            is_optimal = found.shard_size == self.bound.shard_size
            self.best = Choice((*filled, *self.empty), name, *found, is_optimal)

    def try_all(self) -> None:
        for order in permutations(self.filled):
            self.enter("by trial", order)
        self.best = self.best._replace(optimal=True)

    def try_best_fit(self) -> None:
        """The first shard size, from below, for which the greedy rule finds an order."""
        work = 0
        for shard_size in self._sizes():
            order, added = best_fit(self.items, self.num_shards, shard_size)
            work += added
            if order is not None:
                self.enter("best fit", order)
            if order is not None or work > _FITTING_WORK_LIMIT:
                return

    def _sizes(self) -> list[int]:
        """The bound, and multiples of each block, below the best shard size so far."""
        low, multiple = self.bound
        sizes = {low}
        for block in {item.block for item in self.items}:
            step = math.lcm(block, multiple)
            multiples = range(-(-low // step) * step, self.best.shard_size, step)
            sizes.update(multiples[:: len(multiples) // _SIZES_PER_BLOCK + 1])
        return sorted(sizes)
