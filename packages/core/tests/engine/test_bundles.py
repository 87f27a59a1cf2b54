"""What is sent together: runs of small neighbours, the same whatever one rank does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp.program.order import (
    MOST_BYTES,
    Bundles,
    Program,
    Sendable,
    bundled,
    sendable_if_small,
)

SIZES = st.sampled_from([0, 1, MOST_BYTES // 3, MOST_BYTES // 2, MOST_BYTES])
PARCELS = st.lists(st.none() | st.builds(Sendable, SIZES, st.sampled_from("ab")), max_size=12)
UNITS = st.lists(st.integers(0, 11), max_size=20)


def fits(parcels: list[Sendable | None]) -> bool:
    """Whether these may be one message."""
    first = parcels[0]
    return first is not None and all(
        each is not None and each.kind == first.kind for each in parcels
    )


def by_brute_force(units: list[int], parcels: list[Sendable | None]) -> list[list[int]]:
    """From the left, each as long as it may be."""
    found = []
    at = 0
    while at < len(units):
        end = at + 1
        while end < len(units) and may_follow(units, parcels, at, end):
            end += 1
        if units[at] not in units[:at] and parcels[units[at]] is not None:
            found.append(units[at:end])
            at = end
        else:
            at += 1
    return [each for each in found if len(each) > 1]


def may_follow(units: list[int], parcels: list[Sendable | None], at: int, end: int) -> bool:
    run = [parcels[unit] for unit in units[at : end + 1]]
    is_new = units[end] not in units[:end]
    return is_new and fits(run) and sum(p.num_bytes for p in run if p) <= MOST_BYTES


@given(UNITS, PARCELS)
def test_runs_are_those_of_brute_force(units: list[int], parcels: list[Sendable | None]) -> None:
    parcels += [None] * (12 - len(parcels))
    assert bundled(units, parcels.__getitem__) == by_brute_force(units, parcels)


@given(UNITS, PARCELS, st.data())
def test_each_is_sent_once_in_whatever_order_it_is_wanted(
    units: list[int], parcels: list[Sendable | None], data: st.DataObject
) -> None:
    parcels += [None] * (12 - len(parcels))
    bundles = Bundles(Program(units), parcels.__getitem__)
    sent: list[int] = []
    for unit in data.draw(st.permutations(units)):
        together = bundles.send_with(unit)
        if together is None:
            sent.append(unit)
        else:
            assert unit in [*together, *sent]
            sent += together
    assert sorted(sent) == sorted(units)


def test_what_a_forward_writes_to_before_it_runs_is_not_sent_ahead() -> None:
    program = Program([0, 1, 2, 3, 4])
    program.written.add(2)
    bundles = Bundles(program, lambda unit: Sendable(1, None))
    assert [bundles.send_with(unit) for unit in range(5)] == [[0, 1], [], None, [3, 4], []]
    assert bundles.send_with(0) is None  # once more: by itself


def test_what_is_small_for_each_of_many_ranks_is_not_small_in_memory() -> None:
    """A block of 3 MB is 3 KB for each of 1,024 ranks, and one message held all of a model."""
    for num_ranks in (2, 4, 8):
        assert sendable_if_small(3072, num_ranks, None, 8192) == Sendable(3072, None)
    assert sendable_if_small(3072, 1024, None, 8192) is None
    small = sendable_if_small(32, 1024, None, 8192)
    assert small == Sendable(4096, None)
    together = bundled(range(100), lambda _: small)
    assert max(map(len, together)) * 32 * 1024 <= 8 * MOST_BYTES
