"""``plan``: from tensor specs to a layout. Checks, converts to units of the alignment, solves."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from vescale_fsdp.errors import PlanError
from vescale_fsdp.planner.advice import PaddingWarning, advise
from vescale_fsdp.planner.layout import ShardLayout, TensorSpec, checked_int
from vescale_fsdp.planner.orders import choose_order
from vescale_fsdp.planner.search import Item, earliest_start, units


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
