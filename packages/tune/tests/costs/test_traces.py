"""Traces in which some units recompute, by hand; real ones are in `test_peaks`."""

from __future__ import annotations

from vescale_fsdp_tune.costs.model import Event
from vescale_fsdp_tune.costs.traces import mixed_trace

from .problems import MIB, trace

KEEP, ALL = trace(4, 8 * MIB, 8 * MIB), trace(4, MIB, 8 * MIB)


def live(num_changed: int, event: Event) -> list[int]:
    moments = mixed_trace(KEEP, ALL, num_changed).moments
    return [m.live_bytes // MIB for m in moments if m.event is event and m.unit]


def test_the_first_units_keep_less() -> None:
    assert live(0, Event.END_OF_FORWARD) == [8, 16, 24, 32]
    assert live(1, Event.END_OF_FORWARD) == [1, 9, 17, 25]
    assert live(2, Event.END_OF_FORWARD) == [1, 2, 10, 18]
    assert live(4, Event.END_OF_FORWARD) == [1, 2, 3, 4]


def test_in_backward_a_unit_has_its_own_and_what_the_others_keep() -> None:
    mixed = mixed_trace(KEEP, ALL, 2)
    highest = {
        m.unit: m.highest_bytes // MIB
        for m in mixed.moments
        if m.event is Event.GRADIENT and m.unit
    }
    # Unit 4 has what all keep; 3 without what 4 had. Unit 2 recomputes 8 beside 1 of unit 1.
    assert highest == {4: 18, 3: 10, 2: 9, 1: 8}


def test_the_head_sees_what_all_keep() -> None:
    (head,) = (
        m for m in mixed_trace(KEEP, ALL, 3).moments if m.event is Event.BACKWARD and not m.unit
    )
    assert head.live_bytes == (3 * 1 + 8) * MIB
