"""Which order the tensors lie in: that of definition, or another one that needs less room.

The order of definition is the best one for nearly every model. Only where it stays more than 1%
above what all orders need (``lower_bound``) do others compete. An order that cannot win costs one
look (``solve_below``), the rest are solved exactly, and ties stay with the earlier one:

``definition``  as given.
``by trial``    up to five tensors: whichever of all their orders is best.
``by block``    more tensors: largest blocks first, then largest tensors.
``by size``     largest tensors first, then largest blocks.
``best fit``    built for one shard size by a greedy rule (``best_fit``), for a few of them.

The greedy rule. In a row of equal tensors of e elements in blocks of g, S mod g is lost at every
cut, so a tensor loses about (S mod g) e / S: its usual loss. At every position, place the kind of
tensor that saves most against its usual loss. Tensors that may be cut anywhere are kept for places
where all others would lose more than usual. Gates of 16 blocks of 7 units and downs of 56 blocks
of 2, with S = 88; three quarters of the usual loss are 3 for a gate, nothing for a down::

    room to the cut    a gate loses    a down loses    placed
    88                 4               0               down: as usual, the gate 1 more than usual
    64                 1               0               gate: 2 less than usual
    39                 4               1               gate: both lose 1 more, the first kind wins
    11                 15              1               down

It proves nothing: it is a way to orders that are solved exactly afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from vescale_fsdp.planner.solve import Item, earliest_start, lower_bound, solve, solve_below

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


@dataclass
class _Kind:
    """Tensors of one size and block that are still to be placed at a given S."""

    size: int
    block: int
    may_span: bool
    usual_loss: int  # of each tensor
    indices: list[int]  # the next one last


def best_fit(
    items: Sequence[Item], num_shards: int, shard_size: int
) -> tuple[list[int] | None, int]:
    """Indices of the non-empty items in an order that fits ``shard_size``, and the work it took.

    None if the greedy rule finds no such order. Work counts kinds looked at. Cost: O(n) times
    the number of kinds with blocks, less where it breaks off.
    """
    slack = num_shards * shard_size - sum(item.size for item in items)
    blocked, free = _kinds(items, shard_size)
    order: list[int] = []
    position, work = 0, 0  # position in the current shard
    while blocked:
        work += len(blocked)
        found = _best_saving(blocked, position, shard_size)
        if found is None:
            return None, work
        saving, start, kind = found
        if saving < 0 and free:
            start, kind = position, free[0]
        slack -= start - position
        if slack < 0:
            return None, work
        order.append(kind.indices.pop())
        position = (start + kind.size) % shard_size
        if not kind.indices:
            (blocked if kind.block > 1 else free).remove(kind)
    order += [index for kind in free for index in reversed(kind.indices)]
    return (order if slack >= 0 else None), work


def _best_saving(
    kinds: list[_Kind], position: int, shard_size: int
) -> tuple[int, int, _Kind] | None:
    """What saves most at ``position``: the saving, its start, the kind. None if one is stuck."""
    best: tuple[int, int, _Kind] | None = None
    for kind in kinds:
        start = earliest_start(position, kind.size, kind.block, shard_size, kind.may_span)
        if start is None:
            return None
        saving = kind.usual_loss - (start - position)
        if best is None or saving > best[0]:
            best = saving, start, kind
    return best


def _kinds(items: Sequence[Item], shard_size: int) -> tuple[list[_Kind], list[_Kind]]:
    """Kinds with blocks, largest first, and kinds that may be cut anywhere, smallest first.

    Three quarters of the usual loss count: with all of it, kinds are placed where they save a
    little and spoil the place for those that follow. (From 1/2 to 3/4, all cells of the shapes of
    real models that gain 1% or more reach their best; with 0 or 1, some do not.)
    """
    kinds: dict[Item, _Kind] = {}
    for index in reversed(range(len(items))):
        item = items[index]
        if item.size == 0:
            continue
        if item not in kinds:
            usual_loss = 3 * (shard_size % min(item)) * item.size // (4 * shard_size)
            may_span = shard_size % item.block == 0
            kinds[item] = _Kind(*item, may_span, usual_loss, indices=[])
        kinds[item].indices.append(index)
    largest_first = sorted(kinds.values(), key=lambda kind: (-kind.size, -kind.block))
    free = [kind for kind in reversed(largest_first) if kind.block == 1]
    return [kind for kind in largest_first if kind.block > 1], free
