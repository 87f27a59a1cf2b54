"""The search for the least shard size, in plain integers.

The problem. Tensors of sizes e_t and blocks g_t lie in a given order in a buffer of m shards
of S elements. A cut is a multiple of S. A cut strictly inside a tensor must be a whole number
of its blocks away from its start. Find the least S.

Alignment is gone before this module starts: starts, S and therefore all cuts are multiples of
the alignment q, so everything is counted in units of q, with sizes ceil(e / q) and blocks
lcm(g, q) / q (``units``).

**One S.** Each tensor goes to its earliest legal start (``earliest_start``, O(1)); a later
start never helps those that follow. Three cases, here with S = 6 and blocks of 2::

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
layouts of the node from below. If no tensor of the relaxed layout breaks the rule, the layout
is legal and, as no open node has a lower bound, S is the least of all. Otherwise take the
largest tensor that breaks it; its block either divides S (child with M := lcm(M, block)) or it
does not, and the tensor cannot span (child with the block barred).

Example: one tensor of 13 elements in blocks of 3 over 4 shards, so S >= 4. At the root, S = 4
fits: ``|.aaa|aaaa|aaaa|aa..|``. But the cut at 8 is 7 from the start. The child M = 3 gives
S = 6, legal; the child that bars blocks of 3 gives S = 7 (``|.aaaaaa|aaaaaaa|``). So S = 6.

Real models need few nodes: only tensors larger than S can span, their blocks are few distinct
numbers, and barring a tensor costs S >= size / 2. The number of placements is limited all the
same (``WORK_LIMIT``). Past it, the answer is the best legal node so far, or the best set that
is a prefix of the tensors by size, largest first (``prefix_shard_size``). The latter is at
most twice the least S: with S* the least, tensors of more than 2 S* elements do span at S*, so
M divides S*; at 2 S* the others have at most one cut inside, and every cut there was one at S*
too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence, Set
from itertools import count
from typing import NamedTuple

__all__ = [
    "WORK_LIMIT",
    "Item",
    "Solution",
    "earliest_start",
    "prefix_shard_size",
    "solve",
    "units",
]

# Tensors placed before the exact search gives up: a few tenths of a second in CPython. Counted
# in work, not time, because all ranks must come to the same plan.
WORK_LIMIT = 1_000_000

_NONE: frozenset[int] = frozenset()

# Bound on S, ticket, multiple, barred blocks.
_Node = tuple[int, int, int, frozenset[int]]


class Item(NamedTuple):
    """A tensor, or a run of tensors that any cut may go through, in units of the alignment."""

    size: int
    block: int


class Solution(NamedTuple):
    """``shard_size`` in units of the alignment; ``exact`` if it is proven to be the least."""

    shard_size: int
    exact: bool


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


def solve(items: Sequence[Item], num_shards: int, *, work_limit: int = WORK_LIMIT) -> Solution:
    """The least shard size for ``items`` in this order, or one within twice of it.

    Cost: O(n log S) for each node, one to ten nodes for real models; at most about
    ``work_limit`` placements and then O(n log^2 S) for the fallback.
    """
    search = _Search(_merged(items), num_shards)
    low = -(-search.total // num_shards)
    if low == 0:
        return Solution(0, exact=True)
    ticket = count()  # orders nodes of equal bounds, so that sets are never compared
    root = search.least(1, _NONE, low)
    nodes: list[_Node] = [(root, next(ticket), 1, _NONE)]
    while True:
        shard_size, _, multiple, barred = heapq.heappop(nodes)
        offender = search.offender(shard_size, barred)
        if offender is None:
            return Solution(shard_size, exact=True)
        if search.work > work_limit:
            return search.best_found(nodes, low, shard_size)
        children = [(multiple, barred | {offender})]
        joint = math.lcm(multiple, offender)
        if all(joint % block for block in barred):  # otherwise a barred block would divide S
            children.append((joint, barred))
        for child in children:
            bound = search.least(*child, shard_size)
            heapq.heappush(nodes, (bound, next(ticket), *child))


def prefix_shard_size(items: Sequence[Item], num_shards: int) -> int:
    """The best shard size if the largest tensors may span: at most twice the least."""
    search = _Search(_merged(items), num_shards)
    low = -(-search.total // num_shards)
    return search.prefix_least(low) if low else 0


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


class _Search:
    """Feasibility of (items, num_shards) at given S, and bisection over S; counts its work."""

    def __init__(self, items: list[Item], num_shards: int) -> None:
        self.items = items
        self.num_shards = num_shards
        self.total = sum(item.size for item in items)
        self.work = 0

    def fits(self, shard_size: int, barred: Set[int]) -> bool:
        """Whether the relaxed layout ends within the shards."""
        self.work += len(self.items)
        position = 0
        for size, block in self.items:
            if size > shard_size - position % shard_size:  # a cut inside
                start = earliest_start(position, size, block, shard_size, block not in barred)
                if start is None:
                    return False
                position = start
            position += size
        return position <= self.num_shards * shard_size

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

    def best_found(self, nodes: list[_Node], low: int, bound: int) -> Solution:
        """What the search has when it gives up: a legal open node or the best prefix.

        ``bound`` is a lower bound on the least S.
        """
        best = self.prefix_least(low)
        for shard_size, _, _, barred in sorted(nodes):
            if shard_size >= best:
                break
            if self.offender(shard_size, barred) is None:
                best = shard_size
        return Solution(best, exact=best == bound)

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
