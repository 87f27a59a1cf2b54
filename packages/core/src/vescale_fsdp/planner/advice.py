"""What to change where blocks make a layout much larger than its tensors.

Padding up to 5% is fine. More of it is fine too where nothing forces it but the alignment, or
fewer elements than ranks: there no block is to blame, and such groups are small. Otherwise blocks
force it, and a user can have smaller blocks or smaller groups of ranks (HSDP: replicas of a
group). All figures here come from planning the changed group, never from a rule of thumb.

Example: a matrix of 28672 rows of 8192 over 2,048 ranks, 128 rows to a block. There are 224 blocks,
so 1,824 ranks hold nothing: 814% padding. Within 5% are groups of 32 ranks (64 replicas), with 7
blocks each, or blocks of 2 rows, 7 to a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vescale_fsdp.planner.bound import lower_bound
from vescale_fsdp.planner.layout import ShardLayout
from vescale_fsdp.planner.orders import choose_order
from vescale_fsdp.planner.search import Item, units
from vescale_fsdp.planner.spec import TensorSpec

__all__ = ["PADDING_LIMIT", "Advice", "PaddingWarning", "advise"]

PADDING_LIMIT = 0.05

# Kinds of tensors that are told apart when looking for those that force the padding.
_MAX_KINDS = 16


class PaddingWarning(UserWarning):
    """Blocks force more than 5% padding; the message says which, and what to change."""


@dataclass(frozen=True)
class Advice:
    """Why a layout is much larger than its tensors, and what would do. ``str`` is for users.

    Each change is meant by itself, with all else as it is.
    """

    padding_ratio: float
    planned_shards: int  # what the layout was planned for
    forced_by: tuple[str, ...]  # tensors; if they could be cut anywhere, 5% would be kept
    num_shards: int | None  # a group size that keeps 5%: the largest divisor, or one close by
    granularity: tuple[tuple[str, int], ...]  # a smaller block in elements for each forced_by

    def __str__(self) -> str:
        """One sentence on the cause, one on what to do."""
        others = f" and {len(self.forced_by) - 1} more" if len(self.forced_by) > 1 else ""
        cause = (
            f"{100 * self.padding_ratio:.1f}% padding over {self.planned_shards} ranks, forced by "
            f"the blocks of {self.forced_by[0]!r}{others}"
        )
        remedies = []
        if self.num_shards is not None:
            replicas = self.planned_shards // self.num_shards
            if replicas * self.num_shards == self.planned_shards:
                remedies.append(f"groups of {self.num_shards} ranks (HSDP, {replicas} replicas)")
            else:
                remedies.append(f"{self.num_shards} ranks")
        if self.granularity:
            first, block = self.granularity[0]
            likewise = " and the others in proportion" if others else ""
            remedies.append(f"blocks of {block} elements for {first!r}{likewise}")
        if not remedies:
            return f"{cause}. No group size and no smaller block that was tried keeps it within 5%."
        return f"{cause}. Within 5%: {', or '.join(remedies)}."


def advise(layout: ShardLayout, *, order: str = "auto") -> Advice | None:
    """What forces padding of more than 5%, and what to change; None if nothing needs to.

    ``order`` is what the changed plans may use; pass what ``plan`` was given. (With "auto" for a
    layout in the order of definition, None also means that another order is all it takes.)

    ``forced_by``: one kind of tensors (equal shape and block) if one is enough, of those the one
    with the fewest elements. Otherwise kinds are left out of all of them, one after the other,
    while the rest is enough. In a given order, none of what remains can be left out, but there
    may be a smaller set. Beyond 16 kinds, the small ones count as one.

    ``num_shards``: the largest divisor of the ranks above 1 that will do; if none does, the first
    of some numbers around, dense close by. ``granularity``: the blocks of ``forced_by``, counted
    in rows (of the last dimension; in elements where a block is no whole number of rows), halved
    until that is enough; empty if it never is.

    Cost: at most some hundred plans, most of which ``lower_bound`` rules out: up to a second for
    hundreds of tensors, nothing where the padding is small.
    """
    if layout.padding_ratio <= PADDING_LIMIT:
        return None
    group = _Group(layout, try_others=order == "auto")
    if layout.shard_size <= group.limit(layout.num_shards):
        return None
    if order != layout.order_name and group.is_fine(layout.num_shards, group.items):
        return None
    forcing = _forcing(layout, group)
    return Advice(
        padding_ratio=layout.padding_ratio,
        planned_shards=layout.num_shards,
        forced_by=tuple(layout.specs[i].name for i in forcing),
        num_shards=_group_size(layout, group),
        granularity=_granularity(layout, group, forcing),
    )


class _Group:
    """The tensors of a layout, to be planned again with other blocks or ranks."""

    def __init__(self, layout: ShardLayout, *, try_others: bool) -> None:
        self.specs = layout.specs
        self.alignment = layout.alignment
        self.try_others = try_others
        self.num_elements = layout.total_size - layout.padding
        self.items = [units(s.numel, s.block, layout.alignment) for s in layout.specs]
        self.total = sum(item.size for item in self.items)

    def limit(self, num_shards: int) -> int:
        """The largest acceptable S in elements: 5% padding, or as needed without blocks."""
        allowed = int((1 + PADDING_LIMIT) * self.num_elements) // num_shards
        without_blocks = -(-self.total // num_shards) * self.alignment
        return max(allowed, without_blocks)

    def is_fine(self, num_shards: int, items: Sequence[Item]) -> bool:
        """Whether ``items`` over ``num_shards`` keep the limit."""
        limit = self.limit(num_shards) // self.alignment
        if lower_bound(items, num_shards).shard_size > limit:
            return False
        choice = choose_order(items, num_shards, try_others=self.try_others)
        return choice.shard_size <= limit

    def is_fine_with(self, num_shards: int, blocks: dict[int, int]) -> bool:
        """The same with other blocks, in elements, for some of the tensors."""
        items = list(self.items)
        for index, block in blocks.items():
            items[index] = units(self.specs[index].numel, block, self.alignment)
        return self.is_fine(num_shards, items)


def _forcing(layout: ShardLayout, group: _Group) -> list[int]:
    """Indices of the tensors to blame, in the order of the specs."""
    kinds = _kinds(layout, group)

    def is_enough(chosen: Sequence[list[int]]) -> bool:
        cut_anywhere = {index: 1 for kind in chosen for index in kind}
        return group.is_fine_with(layout.num_shards, cut_anywhere)

    for kind in kinds:
        if is_enough([kind]):
            return kind
    chosen = kinds
    for kind in kinds:
        rest = [other for other in chosen if other is not kind]
        if is_enough(rest):
            chosen = rest
    return sorted(index for kind in chosen for index in kind)


def _kinds(layout: ShardLayout, group: _Group) -> list[list[int]]:
    """Indices of tensors with equal shapes and blocks, the fewest elements first."""
    by_kind: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for index, (spec, item) in enumerate(zip(layout.specs, group.items, strict=True)):
        if item.size and item.block > 1:
            by_kind.setdefault((spec.shape, spec.block), []).append(index)
    kinds = sorted(by_kind.values(), key=lambda kind: len(kind) * layout.specs[kind[0]].numel)
    small, large = kinds[: 1 - _MAX_KINDS], kinds[1 - _MAX_KINDS :]
    return [sorted(index for kind in small for index in kind), *large] if small else large


def _group_size(layout: ShardLayout, group: _Group) -> int | None:
    planned = layout.num_shards
    small = [k for k in range(2, math.isqrt(planned) + 1) if planned % k == 0]
    divisors = sorted({planned // k for k in small} | set(small), reverse=True)
    for num_shards in (*divisors, *_around(planned)):
        if group.is_fine(num_shards, group.items):
            return num_shards
    return None


def _around(planned: int) -> Iterator[int]:
    """Above 1: distances 1, 2, 3, ..., 8 either way, then downwards by a quarter each."""
    for distance in range(1, 9):
        if planned - distance > 1:
            yield planned - distance
        yield planned + distance
    num_shards = (planned - 8) * 3 // 4
    while num_shards > 1:
        yield num_shards
        num_shards = num_shards * 3 // 4


def _granularity(
    layout: ShardLayout, group: _Group, forcing: Sequence[int]
) -> tuple[tuple[str, int], ...]:
    counts = {index: _rows(layout.specs[index]) for index in forcing}
    while any(count > 1 for count, _ in counts.values()):
        counts = {index: (max(1, count // 2), row) for index, (count, row) in counts.items()}
        blocks = {index: count * row for index, (count, row) in counts.items()}
        if group.is_fine_with(layout.num_shards, blocks):
            return tuple((layout.specs[index].name, block) for index, block in blocks.items())
    return ()


def _rows(spec: TensorSpec) -> tuple[int, int]:
    """The block as a number of rows and the elements of one; at most the whole tensor."""
    block = min(spec.block, spec.numel)
    row = spec.shape[-1] if len(spec.shape) > 1 and block % spec.shape[-1] == 0 else 1
    return block // row, row
