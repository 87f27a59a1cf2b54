"""The least shard size for a given order of tensors, and a bound for all orders.

The problem. Tensors of sizes e_t and blocks g_t are in a buffer of m shards of S elements. A cut
(shard boundary) is a multiple of S. A cut strictly inside a tensor must be a whole number of its
blocks away from its start. Find the least S.

Alignment is gone before this module starts: starts, S and therefore all cuts are multiples of
the alignment q, so everything is counted in units of q, with sizes ceil(e / q) and blocks
lcm(g, q) / q (``units``).

**One S.** A tensor that comes next goes to its earliest legal start (``earliest_start``, O(1)).
Three cases, here with S = 6 and blocks of 2::

    fits                |..aaaa|                 no cut inside
    crosses one cut     |...bbb|bbb...|          refused: the cut is 3 from the start
                        |....bb|bbbb..|          so the start moves: the cut is 2 from it
    spans whole shards  |....cc|cccccc|cc....|   needs the block to divide S as well

**All S.** Growing S can lose a layout: one tensor of 6 elements in blocks of 2 over 3 shards
fits with S = 2 and S = 4, not with S = 3. Only spanning does this. So take a set of blocks
whose tensors may span and bar the others from it, let M be the least common multiple of the
set, and look at multiples of M only: there a larger S never loses, and the least S is found
by bisection.

**Which set?** Branch and bound, best bound first. A node is (M, barred): S is a multiple of M,
tensors with a barred block do not span, all others may span *even if their block does not
divide S*. That relaxation is monotone as well, so its least S, found by bisection, bounds all
layouts of the node from below. If no tensor of the relaxed layout breaks the rule, S is the
least of all, for no open node has a lower bound. Otherwise take the largest tensor that breaks
it; its block either divides S (child with M := lcm(M, block)) or it does not, and the tensor
cannot span (child with the block barred).

Example: one tensor of 13 elements in blocks of 3 over 4 shards, so S >= 4. At the root, S = 4
fits: ``|.aaa|aaaa|aaaa|aa..|``. But the cut at 8 is 7 from the start. The child M = 3 gives
S = 6, legal; the child that bars blocks of 3 gives S = 7 (``|.aaaaaa|aaaaaaa|``). So S = 6.

Two searches use it, and differ in what "fits" means.

**For an order** (``solve``). At one S, each tensor goes to its earliest legal start; a later start
never helps those that follow. Over all S, it is this branch and bound. Real models
need few nodes. The number of placements is limited all the same (``WORK_LIMIT``). Past it, the
answer is the best legal node so far, or the best set that is a prefix of the tensors by size,
largest first (``prefix_least``). The latter is at most twice the least S: with S* the least,
tensors of more than 2 S* elements do span at S*, so M divides S*; at 2 S* the others have at most
one cut inside, and every cut there was one at S* too.

**For all orders** (``lower_bound``). S must hold the average, and each tensor must have a legal
start by itself: it fits in a shard, or it crosses one cut, which leaves it at most S after the cut
and the whole blocks of S before it, or its block divides S. The same branch and bound finds the
least such S, over the distinct (size, block) only. 13 elements in blocks of 5 over 4 shards: S = 4
holds no block; 5 is divided by 5, so 5 is the bound, and 6 would be refused: 5 before a cut leave 8
after it. The bound knows nothing of how tensors share a shard: the least S may be above it.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from itertools import count
from typing import NamedTuple

_NONE: frozenset[int] = frozenset()


class Item(NamedTuple):
    """A tensor, or a run of tensors that any cut may go through, in units of the alignment."""

    size: int
    block: int


class Node(NamedTuple):
    """All S that are multiples of ``multiple`` where no tensor with a ``barred`` block spans."""

    bound: int  # no such S below it is legal
    ticket: int  # orders nodes of equal bounds, so that sets are never compared
    multiple: int
    barred: frozenset[int]


def units(numel: int, block: int, alignment: int) -> Item:
    """Size and block counted in units of ``alignment``: (10, 6) at 4 is (3, 3)."""
    return Item(-(-numel // alignment), block // math.gcd(block, alignment))


def earliest_start(
    position: int, size: int, block: int, shard_size: int, may_span: bool
) -> int | None:
    """The least legal start at or after ``position``, or None if no start is legal. O(1).

    ``may_span`` says whether the tensor may have more than one cut inside; the first of them is
    on a block boundary anyhow. Looking at two cuts is enough: legality repeats with every shard.
    """
    for room in (shard_size - position % shard_size, shard_size):
        if size <= room:
            return position
        before_cut = room - room % block
        if before_cut > 0 and (may_span or size - before_cut <= shard_size):
            return position + room - before_cut
        position += room
    return None


class Search(ABC):
    """Branch and bound for items over equal shards; counts its work.

    ``total`` and all bounds are in units of the alignment. ``work`` counts items looked at: a
    measure of time that is the same on every rank.
    """

    def __init__(self, items: Sequence[Item], num_shards: int) -> None:
        self.items = items
        self.num_shards = num_shards
        self.total = sum(item.size for item in items)
        self.work = 0

    @abstractmethod
    def fits(self, shard_size: int, barred: Set[int]) -> bool:
        """Whether the relaxed problem has a layout; monotone in ``shard_size``."""

    @abstractmethod
    def offender(self, shard_size: int, barred: Set[int]) -> int | None:
        """The block of the largest tensor that breaks the rule at a ``shard_size`` that fits."""

    def branch(self, low: int, work_limit: int) -> tuple[list[Node], bool]:
        """Open nodes as a heap, and whether the first of them is the answer.

        ``low`` is a lower bound on S above 0. If the work runs out first, the bound of the first
        node is still a lower bound on S.
        """
        ticket = count()
        nodes = [Node(self.least(1, _NONE, low), next(ticket), 1, _NONE)]
        while True:
            bound, _, multiple, barred = nodes[0]
            offender = self.offender(bound, barred)
            if offender is None or self.work > work_limit:
                return nodes, offender is None
            heapq.heappop(nodes)
            children = [(multiple, barred | {offender})]
            joint = math.lcm(multiple, offender)
            if all(joint % block for block in barred):  # otherwise a barred block would divide S
                children.append((joint, barred))
            for child in children:
                least = self.least(*child, bound)
                heapq.heappush(nodes, Node(least, next(ticket), *child))

    def least(self, multiple: int, barred: Set[int], low: int) -> int:
        """The least multiple of ``multiple``, at least ``low``, that fits.

        Fitting is monotone over these multiples. It is certain once S holds everything.
        Steps double from ``low``, because the answer is usually close to it.
        """
        first = -(-low // multiple)
        if self.fits(first * multiple, barred):
            return first * multiple
        bad, step = first, 1
        while not self.fits((bad + step) * multiple, barred):
            bad, step = bad + step, 2 * step
        good = bad + step
        while good - bad > 1:
            middle = (bad + good) // 2
            if self.fits(middle * multiple, barred):
                good = middle
            else:
                bad = middle
        return good * multiple


# Tensors placed before the exact search gives up: a tenth of a second or so in CPython. Counted
# in work, not time, because all ranks must come to the same plan.
WORK_LIMIT = 1_000_000


class Solution(NamedTuple):
    """``shard_size`` in units of the alignment; ``exact`` if it is proven to be the least."""

    shard_size: int
    exact: bool


def solve(
    items: Sequence[Item], num_shards: int, *, low: int = 0, work_limit: int = WORK_LIMIT
) -> Solution:
    """The least shard size for ``items`` in this order, or one within twice of it.

    ``low`` is a bound on it that the caller knows already (``lower_bound``). Cost: O(n log S)
    for each node, one to ten nodes for real models; at most about ``work_limit`` placements and
    then O(n log^2 S) for the fallback.
    """
    search = _InOrder(_merged(items), num_shards)
    low = max(low, -(-search.total // num_shards))
    return search.run(low, work_limit) if low else Solution(0, exact=True)


def solve_below(
    items: Sequence[Item], num_shards: int, *, low: int, below: int, work_limit: int = WORK_LIMIT
) -> Solution | None:
    """``solve`` if it finds less than ``below``, otherwise None; ``low`` is at least 1.

    An order that cannot win costs O(n): it does not fit at ``below - 1`` even if every tensor
    may span, and if not there, nowhere below.
    """
    search = _InOrder(_merged(items), num_shards)
    if low >= below or not search.fits(below - 1, frozenset()):
        return None
    found = search.run(low, work_limit)
    return found if found.shard_size < below else None


def _merged(items: Sequence[Item]) -> list[Item]:
    """Without empty items, and with neighbours that any cut may go through as one."""
    merged: list[Item] = []
    for item in items:
        if item.size == 0:
            continue
        if item.block == 1 and merged and merged[-1].block == 1:
            merged[-1] = Item(merged[-1].size + item.size, 1)
        else:
            merged.append(item)
    return merged


class _InOrder(Search):
    """The relaxation that places the items one after the other."""

    def fits(self, shard_size: int, barred: Set[int]) -> bool:
        """Whether the relaxed layout ends within the shards: its gaps must not use up the slack.

        Nearly all time goes here, so ``earliest_start`` is written out, for one item after the
        other, and it ends as soon as the gaps are too much.
        """
        self.work += len(self.items)
        slack = self.num_shards * shard_size - self.total
        room = shard_size  # up to the next cut
        for size, block in self.items:
            if size <= room:
                room -= size
                continue
            before_cut = room - room % block
            gap = room - before_cut
            rest = size - before_cut
            if before_cut == 0 or (rest > shard_size and block in barred):  # from the next cut on
                rest = size
                if size > shard_size:
                    before_cut = shard_size - shard_size % block
                    gap = room + shard_size - before_cut
                    rest = size - before_cut
                    if before_cut == 0 or (rest > shard_size and block in barred):
                        return False
                else:
                    gap = room
            slack -= gap
            if slack < 0:
                return False
            room = shard_size - rest % shard_size
        return slack >= 0

    def offender(self, shard_size: int, barred: Set[int]) -> int | None:
        """The block of the largest tensor that spans though its block does not divide S.

        ``shard_size`` must fit. None means that the relaxed layout is a legal one.
        """
        self.work += len(self.items)
        position, largest, offender = 0, 0, None
        for size, block in self.items:
            start = earliest_start(position, size, block, shard_size, block not in barred)
            assert start is not None, "the layout of a node fits at the node's bound"
            second_cut = (start // shard_size + 2) * shard_size
            position = start + size
            if position > second_cut and shard_size % block and size > largest:
                largest, offender = size, block
        return offender

    def run(self, low: int, work_limit: int) -> Solution:
        """The least S that is legal, or what there is when the work runs out."""
        nodes, is_answer = self.branch(low, work_limit)
        return Solution(nodes[0].bound, exact=True) if is_answer else self.best_found(nodes, low)

    def best_found(self, nodes: list[Node], low: int) -> Solution:
        """What the search has when it gives up: a legal open node or the best prefix."""
        best = self.prefix_least(low)
        for node in sorted(nodes):
            if node.bound >= best:
                break
            if self.offender(node.bound, node.barred) is None:
                best = node.bound
        return Solution(best, exact=best == nodes[0].bound)

    def prefix_least(self, low: int) -> int:
        """The least S over all prefixes by size. A new M at least doubles: O(log S) of them."""
        blocks = {item.block for item in self.items}
        multiple = 1
        best = self.least(1, {block for block in blocks if block > 1}, low)
        for item in sorted(self.items, key=lambda item: -item.size):
            if multiple % item.block == 0:
                continue
            multiple = math.lcm(multiple, item.block)
            if multiple >= best:
                break
            barred = {block for block in blocks if multiple % block}
            best = min(best, self.least(multiple, barred, low))
        return best


# Looked-at (size, block) pairs before the search is broken off: some 10 ms in CPython.
_BOUND_WORK_LIMIT = 50_000


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
    nodes, _ = search.branch(low, _BOUND_WORK_LIMIT)
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
