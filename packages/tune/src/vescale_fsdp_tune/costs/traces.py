"""Traces of other settings, made of measured ones: some units recompute, or several are one unit.

A trace of a model in which only the first units recompute is made of two: that in which all units
keep their activations, and that in which all recompute. Both have the same moments. What a unit
keeps from its forward to its backward is known from both::

    kept(unit) = live at the end of its forward - live at its beginning

Within a unit's own forward and backward the mixed trace is that of the unit's setting. There, what
other units keep between their forward and backward is corrected by the difference of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vescale_fsdp_tune.costs.model import Event, Moment, Trace

_ROOT = 0


def mixed_trace(keep: Trace, changed: Trace, num_changed: int) -> Trace:
    """Return the trace if the first ``num_changed`` units are as in ``changed``.

    Args:
        keep: all units keep their activations.
        changed: all units but the root recompute or offload them.
        num_changed: of the units but the root, in forward order.
    """
    if num_changed == 0:
        return keep
    if num_changed >= max(moment.unit for moment in keep.moments):
        return changed
    saved = _kept_by_call(keep)
    for call, num_bytes in _kept_by_call(changed).items():
        saved[call] -= num_bytes
    open_calls: dict[int, int] = {}  # with their units, between forward and backward
    running: list[int] = [_ROOT]
    moments = []
    for ours, theirs in zip(keep.moments, changed.moments, strict=True):
        own = ours.unit if ours.event is not Event.END else _ROOT
        is_changed = 0 < running[-1] <= num_changed
        base = theirs if is_changed else ours
        offset = 0
        for call, unit in open_calls.items():
            if is_changed and not unit <= num_changed:
                offset += saved[call]
            elif not is_changed and unit <= num_changed:
                offset -= saved[call]
        moments.append(
            replace(
                ours,
                highest_bytes=max(base.highest_bytes + offset, 0),
                live_bytes=max(base.live_bytes + offset, 0),
            )
        )
        if own == _ROOT or ours.event is Event.GRADIENT:
            continue
        if ours.event in (Event.FORWARD, Event.BACKWARD):
            running.append(own)
            open_calls.pop(ours.call, None)
        else:
            running.remove(own)
            if ours.event is Event.END_OF_FORWARD:
                open_calls[ours.call] = own
    host_bytes = changed.host_bytes * num_changed // max(m.unit for m in keep.moments)
    return Trace(tuple(moments), host_bytes)


def _kept_by_call(trace: Trace) -> dict[int, int]:
    """Return the bytes that each forward of a unit keeps for its backward."""
    begin: dict[int, int] = {}
    kept: dict[int, int] = {}
    for moment in trace.moments:
        if moment.event is Event.FORWARD:
            begin[moment.call] = moment.live_bytes
        elif moment.event is Event.END_OF_FORWARD:
            kept[moment.call] = moment.live_bytes - begin[moment.call]
    return kept


def merged_trace(trace: Trace, unit_of: Sequence[int], shift: Sequence[Sequence[int]]) -> Trace:
    """Return the trace if neighbouring units are one.

    Args:
        unit_of: the new index of each unit.
        shift: for each old unit, the new index of each of its groups.

    A merged unit's forward is from the first of its forwards to the last, and its backward too.
    Units must run in order of definition, once.
    """
    last = {new: old for old, new in enumerate(unit_of)}
    first = {new: old for old, new in reversed([*enumerate(unit_of)])}
    kept: list[Moment] = []
    highest = 0
    for moment in trace.moments:
        new = unit_of[moment.unit]
        is_middle = {
            Event.FORWARD: moment.unit != first[new],
            Event.END_OF_FORWARD: moment.unit != last[new],
            Event.BACKWARD: moment.unit != last[new],
            Event.END_OF_BACKWARD: moment.unit != first[new],
        }.get(moment.event, False)
        highest = max(highest, moment.highest_bytes)
        if is_middle:
            continue
        group = moment.group
        if moment.event is Event.GRADIENT:
            group = shift[moment.unit][moment.group]
        kept.append(replace(moment, unit=new, call=new, group=group, highest_bytes=highest))
        highest = 0
    return Trace(tuple(kept), trace.host_bytes)


def runs_in_order(trace: Trace) -> bool:
    """Whether each unit runs once, one after the other, in order of definition."""
    order = [moment.unit for moment in trace.moments if moment.event is Event.FORWARD]
    return order == [*range(len(order))]
