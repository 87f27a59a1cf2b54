"""Branch and bound over shard sizes, in plain integers: what every search here has in common.

The problem. Tensors of sizes e_t and blocks g_t lie in a buffer of m shards of S elements. A cut
is a multiple of S. A cut strictly inside a tensor must be a whole number of its blocks away from
its start. Find the least S.

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

What "fits" means is for the two searches in ``solve`` to say.
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
