"""``plan``: from tensor specs to a layout; and ``advise``: what to change if blocks cause padding.

``plan`` checks its input, converts it to units of the alignment, and solves it.

Padding up to 5% is fine. More is fine too if only the alignment causes it, or if there are fewer
elements than ranks: no block is the reason, and such groups are small. Otherwise blocks cause it,
and a user can have smaller blocks or smaller groups of ranks (HSDP: replicas of a group). All
figures here come from planning the changed group, never from a rule of thumb.

Example: a matrix of 28672 rows of 8192 over 2,048 ranks, 128 rows to a block. There are 224 blocks,
so 1,824 ranks hold nothing: 814% padding. Within 5% are groups of 32 ranks (64 replicas), with 7
blocks each, or blocks of 2 rows, 7 to a rank. Small groups cannot keep 5%, whatever their blocks;
their goal is the size that the group has without blocks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vescale_fsdp.errors import PlanError
from vescale_fsdp.planner.layout import ShardLayout, TensorSpec, checked_int
from vescale_fsdp.planner.orders import choose_order
from vescale_fsdp.planner.solve import Item, earliest_start, lower_bound, units

PADDING_LIMIT = 0.05

# Kinds of tensors that are told apart when looking for those that force the padding.
_MAX_KINDS = 16


class PaddingWarning(UserWarning):
    """Blocks force more than 5% padding; the message says which, and what to change."""


@dataclass(frozen=True)
class Advice:
    """Why a layout is much larger than its tensors, and which changes help. ``str`` is for users.

    Each change is an alternative: it assumes that nothing else changes.
    """

    padding_ratio: float
    planned_shards: int  # what the layout was planned for
    forced_by: tuple[str, ...]  # tensors; cut anywhere, they would leave 5%, or what is least
    num_shards: int | None  # a group size that keeps that: the largest divisor, or one close by
    num_shards_padding_ratio: float | None  # with that group size
    granularity: tuple[tuple[str, int], ...]  # a smaller block in elements for each forced_by
    granularity_padding_ratio: float  # with those blocks
    is_below_row: bool  # one of those blocks is smaller than a row of its tensor

    def __str__(self) -> str:
        """One sentence on the cause, one or two on what to do, and what that gives."""
        others = f" and {len(self.forced_by) - 1} more" if len(self.forced_by) > 1 else ""
        cause = (
            f"{100 * self.padding_ratio:.1f}% padding over {self.planned_shards} ranks, forced by "
            f"the blocks of {self.forced_by[0]!r}{others}"
        )
        remedies = [(self._finer(others), self.granularity_padding_ratio)]
        if self.num_shards_padding_ratio is not None:
            remedies.insert(0, (self._fewer_ranks(), self.num_shards_padding_ratio))
        within = [text for text, ratio in remedies if ratio <= PADDING_LIMIT]
        least = [
            f"{text} ({100 * ratio:.1f}%)" for text, ratio in remedies if ratio > PADDING_LIMIT
        ]
        sentences = [cause]
        if within:
            sentences.append(f"Within 5%: {', or '.join(within)}")
        if least:
            sentences.append(f"The least padding that the group allows: {', or '.join(least)}")
        return ". ".join(sentences) + "."

    def _fewer_ranks(self) -> str:
        assert self.num_shards is not None, "only with a padding ratio"
        replicas, rest = divmod(self.planned_shards, self.num_shards)
        if rest or replicas == 0:
            return f"{self.num_shards} ranks"
        return f"groups of {self.num_shards} ranks (HSDP, {replicas} replicas)"

    def _finer(self, others: str) -> str:
        name, block = self.granularity[0]
        elements = "1 element" if block == 1 else f"{block} elements"
        likewise = " and smaller ones for the others" if others else ""
        below = ", which are smaller than a row" if self.is_below_row else ""
        return f"blocks of {elements} for {name!r}{likewise}{below}"


def advise(layout: ShardLayout, *, order: str = "auto") -> Advice | None:
    """Find the tensors that force more than 5% padding, and changes that help; None if none do.

    ``order`` is the order of the changed plans; pass the one that ``plan`` got. (With "auto" for a
    layout in the order of definition, None also means that another order is enough.)

    ``forced_by``: one kind of tensors (equal shape and block) if one alone forces it, of those the
    one with the fewest elements. Otherwise kinds are left out of all of them, one after the other,
    while the rest is enough. In a given order, none of what remains can be left out, but there may
    be a smaller set. Beyond 16 kinds, the small ones count as one.

    "Enough" is padding within 5%, or a shard no larger than without any blocks.

    ``num_shards``: the largest divisor of the ranks above 1 that is enough; if none is, the first
    of some other numbers, densest near the number of ranks. ``granularity``: the blocks of
    ``forced_by``, counted in rows (of the last dimension; in elements where a block is no whole
    number of rows), halved until that is enough; below a row, powers of two of elements
    (``is_below_row``).

    Cost: at most some hundred plans, most of which ``lower_bound`` rules out: up to a second for
    hundreds of tensors, nothing where the padding is small.
    """
    group = _forced_group(layout, order)
    if group is None:
        return None
    forcing = _forcing(layout, group)
    num_shards, fewer_ratio = _group_size(layout, group)
    blocks, finer_ratio = _granularity(layout, group, forcing)
    return Advice(
        padding_ratio=layout.padding_ratio,
        planned_shards=layout.num_shards,
        forced_by=tuple(layout.specs[i].name for i in forcing),
        num_shards=num_shards,
        num_shards_padding_ratio=fewer_ratio,
        granularity=tuple((layout.specs[i].name, block) for i, block in blocks.items()),
        granularity_padding_ratio=finer_ratio,
        is_below_row=any(block < _row(layout.specs[i]) for i, block in blocks.items()),
    )


def is_forced(layout: ShardLayout, *, order: str = "auto") -> bool:
    """Whether ``advise`` has something to say, for the price of one or two plans."""
    return _forced_group(layout, order) is not None


def _forced_group(layout: ShardLayout, order: str) -> _Group | None:
    """The group to plan again, if blocks force its padding above the limit."""
    if layout.padding_ratio <= PADDING_LIMIT:
        return None
    group = _Group(layout, try_others=order == "auto")
    if layout.shard_size <= group.limit(layout.num_shards):
        return None
    if order != layout.order_name and group.is_fine(layout.num_shards, group.items):
        return None
    return group


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

    def fine_ratio(self, num_shards: int, items: Sequence[Item]) -> float | None:
        """The padding ratio of ``items`` over ``num_shards``, or None if above the limit."""
        limit = self.limit(num_shards) // self.alignment
        if lower_bound(items, num_shards).shard_size > limit:
            return None
        choice = choose_order(items, num_shards, try_others=self.try_others)
        if choice.shard_size > limit:
            return None
        return choice.shard_size * self.alignment * num_shards / self.num_elements - 1

    def is_fine(self, num_shards: int, items: Sequence[Item]) -> bool:
        """Whether ``items`` over ``num_shards`` keep the limit."""
        return self.fine_ratio(num_shards, items) is not None

    def with_blocks(self, blocks: dict[int, int]) -> list[Item]:
        """The items with other blocks, in elements, for some of the tensors."""
        items = list(self.items)
        for index, block in blocks.items():
            items[index] = units(self.specs[index].numel, block, self.alignment)
        return items


def _forcing(layout: ShardLayout, group: _Group) -> list[int]:
    """Indices of the tensors to blame, in the order of the specs."""
    kinds = _kinds(layout, group)

    def is_enough(chosen: Sequence[list[int]]) -> bool:
        cut_anywhere = {index: 1 for kind in chosen for index in kind}
        return group.is_fine(layout.num_shards, group.with_blocks(cut_anywhere))

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


def _group_size(layout: ShardLayout, group: _Group) -> tuple[int | None, float | None]:
    """A number of ranks that will do, and the padding ratio with it; or twice None."""
    planned = layout.num_shards
    small = [k for k in range(2, math.isqrt(planned) + 1) if planned % k == 0]
    divisors = sorted({planned // k for k in small} | set(small), reverse=True)
    for num_shards in (*divisors, *_around(planned)):
        ratio = group.fine_ratio(num_shards, group.items)
        if ratio is not None:
            return num_shards, ratio
    return None, None


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
) -> tuple[dict[int, int], float]:
    """Smaller blocks by index that will do, and the padding ratio with them."""
    specs = layout.specs
    blocks = {index: min(specs[index].block, specs[index].numel) for index in forcing}
    counted_in = {index: _unit(specs[index], block) for index, block in blocks.items()}
    while any(block > 1 for block in blocks.values()):
        blocks = _smaller(blocks, counted_in)
        ratio = group.fine_ratio(layout.num_shards, group.with_blocks(blocks))
        if ratio is not None:
            return blocks, ratio
    raise AssertionError("without blocks the limit is kept, or nothing is forced")


def _smaller(blocks: dict[int, int], counted_in: dict[int, int]) -> dict[int, int]:
    """Half as many units, at least one; where all are that small, the next lower powers of two."""
    if any(block > counted_in[index] for index, block in blocks.items()):
        halves = {i: block // counted_in[i] // 2 * counted_in[i] for i, block in blocks.items()}
        return {i: half or min(blocks[i], counted_in[i]) for i, half in halves.items()}
    return {i: 1 << (block - 1).bit_length() - 1 if block > 1 else 1 for i, block in blocks.items()}


def _unit(spec: TensorSpec, block: int) -> int:
    """What blocks are counted in: rows, if ``block`` is a whole number of them, or elements."""
    row = _row(spec)
    return row if block % row == 0 else 1


def _row(spec: TensorSpec) -> int:
    return spec.shape[-1] if len(spec.shape) > 1 else 1


def plan(
    specs: Iterable[TensorSpec], num_shards: int, *, alignment: int = 1, order: str = "auto"
) -> ShardLayout:
    """Lay out ``specs`` over ``num_shards`` equal shards that are as small as possible.

    ``alignment`` counts elements: the shard size and every tensor's start are multiples of it.
    Then shard boundaries are at multiples of ``lcm(block, alignment)`` elements of a tensor.

    ``order="definition"`` keeps the order of ``specs``. ``"auto"`` also keeps it, unless it costs
    over 1% more than a lower bound for all orders and another order costs less (``orders``).
    ``ShardLayout.order`` and ``order_name`` name the order; ``offsets`` are always in the order
    of ``specs``.

    The result depends on the arguments only, so all ranks compute the same one without
    communication; compare ``digest`` to be sure. The shard size is the least possible for the
    order used if ``exact`` is true, and at most twice the least otherwise (the search gave up,
    see ``solve``); it is the least for all orders if ``optimal`` is true. Cost: a few
    milliseconds for hundreds of tensors, for any number of shards; some tens if other
    orders are tried, and up to a second for a warning.

    Issues a ``PaddingWarning`` if blocks force more than 5% padding (see ``advise``).

    Raises:
        PlanError: ``num_shards`` or ``alignment`` is no integer or below 1, ``order`` is unknown,
            or two specs have the same name.
    """
    layout = lay_out(specs, num_shards, alignment=alignment, order=order)
    advice = advise(layout, order=order)
    if advice is not None:
        warnings.warn(str(advice), PaddingWarning, stacklevel=2)
    return layout


def lay_out(
    specs: Iterable[TensorSpec], num_shards: int, *, alignment: int = 1, order: str = "auto"
) -> ShardLayout:
    """``plan`` without the warning, for callers that plan many groups and issue their own warnings.

    Raises:
        PlanError: as ``plan``.
    """
    specs = tuple(specs)
    num_shards = checked_int(num_shards, "num_shards", 1, "pass the number of ranks in the group")
    alignment = checked_int(alignment, "alignment", 1, "pass 1 if tensors may start anywhere")
    if order not in ("auto", "definition"):
        raise PlanError(
            f"order is {order!r}, expected 'auto' or 'definition'; 'definition' keeps the order "
            "of the specs"
        )
    _refuse_duplicates(specs)
    items = [units(spec.numel, spec.block, alignment) for spec in specs]
    choice = choose_order(items, num_shards, try_others=order == "auto")
    offsets = _offsets(items, choice.order, choice.shard_size)
    return ShardLayout(
        specs=specs,
        num_shards=num_shards,
        alignment=alignment,
        shard_size=choice.shard_size * alignment,
        offsets=tuple(offset * alignment for offset in offsets),
        order=choice.order,
        exact=choice.exact,
        order_name=choice.name,
        optimal=choice.optimal,
    )


def _offsets(items: Sequence[Item], order: Sequence[int], shard_size: int) -> list[int]:
    """The earliest legal start of each item, placed in ``order``, in units of the alignment."""
    offsets = [0] * len(items)
    position = 0
    for index in order:
        size, block = items[index]
        if size:  # an empty tensor lies where the one before it ends
            may_span = shard_size % block == 0
            start = earliest_start(position, size, block, shard_size, may_span)
            assert start is not None, "the solver returned a shard size that does not fit"
            position = start
        offsets[index] = position
        position += size
    return offsets


def _refuse_duplicates(specs: tuple[TensorSpec, ...]) -> None:
    first_index: dict[str, int] = {}
    for index, spec in enumerate(specs):
        first = first_index.setdefault(spec.name, index)
        if first != index:
            raise PlanError(
                f"tensor {spec.name!r} is given twice, as specs {first} and {index}, expected "
                f"each name once; give a tied parameter one spec, and other tensors different names"
            )
