"""What a step does, as data: the example of the docstring, and what settings change in it."""

from __future__ import annotations

from collections.abc import Sequence

from vescale_fsdp.program import Sendable
from vescale_fsdp.program.rehearsal import Act, Action, Rehearsal, RehearsedUnit

SMALL = Sendable(64, None)


def unit(*, trained: bool = True, keeps: bool = False, small: bool = False) -> RehearsedUnit:
    part = SMALL if small else None
    return RehearsedUnit((4, 4), (trained,), keeps, part, (part,))


def rehearsal(*blocks: RehearsedUnit, has_streams: bool = True, zero2: bool = False) -> Rehearsal:
    """A root, which stays unsharded until its backward, and its blocks."""
    return Rehearsal(
        [unit(keeps=True), *blocks],
        in_flight=2,
        has_streams=has_streams,
        reshards=True,
        reduces_always=zero2,
        sends_small=True,
    )


def said(actions: Sequence[Action]) -> str:
    """An act with its unit or its items, and the others of one message."""
    words = []
    for act, number, items, _ in actions:
        shown = [number] if act is Act.GATHER and list(items) == [number] else items
        about = shown if act is Act.GATHER or number < 0 else [number]
        words.append(" ".join([act.name, *map(str, about)]))
    return ", ".join(words)


def step(engine: Rehearsal, num_units: int, *, synchronizes: bool = True) -> list[str]:
    """A forward and a backward of all units."""
    engine.begin(synchronizes=synchronizes)
    done = [engine.before_forward(0, 0)]
    for index in range(1, num_units):
        done.append(engine.before_forward(index, index))
        done.append(engine.after_forward(index, index, is_closed=False, is_visited=True))
    done.append(engine.after_forward(0, 0, is_closed=False, is_visited=True))
    done.append(engine.begin_backward())
    done.append(engine.before_backward(0, 0))
    for index in range(num_units - 1, 0, -1):
        done.append(engine.before_backward(index, index))
        done.append(engine.half_of_gradients(index))
        done.append(engine.after_backward(index, index))
    done.append(engine.after_backward(0, 0))
    done.append(engine.finish_backward())
    return [said(actions) for actions in done]


def test_the_step_of_the_docstring() -> None:
    assert step(rehearsal(unit(), unit()), 3) == [
        "BEGIN_PASS, GATHER 0, GATHER 1, WAIT 0",
        "GATHER 2, WAIT 1",
        "FREE 1",
        "WAIT 2",
        "FREE 2",
        "DROP_MESSAGE 0, END_WALK",
        "",
        "GATHER 2, WAIT 0",
        "GATHER 1, WAIT 2",
        "",
        "FREE 2, REDUCE 2",
        "WAIT 1",
        "",
        "FREE 1, FINISH 2, REDUCE 1",
        "FREE 0, FINISH 1, REDUCE 0",
        "END_WALK, FINISH 0, END_BACKWARD",
    ]


def test_without_streams_reductions_alternate_with_all_gathers() -> None:
    done = step(rehearsal(unit(), unit(), unit(), has_streams=False), 4)
    begins, half = done[done.index("GATHER 3, WAIT 0") + 4 :][:2]  # of the backward of 2
    assert (begins, half) == ("WAIT 2", "FINISH 3, GATHER 1")


def test_a_micro_batch_that_does_not_synchronize_reduces_only_if_told_to() -> None:
    for zero2 in (False, True):
        done = step(rehearsal(unit(), zero2=zero2), 2, synchronizes=False)
        assert any("REDUCE" in each for each in done) == zero2


def test_frozen_units_are_not_reduced() -> None:
    done = step(rehearsal(unit(trained=False), unit()), 3)
    assert [each for each in done if "REDUCE 1" in each] == []
    assert sum("REDUCE" in each for each in done) == 2


def test_small_neighbours_share_messages() -> None:
    blocks = [unit(small=True), unit(small=True)]
    first, second, *_ = step(rehearsal(*blocks, has_streams=False), 3)
    assert first == "BEGIN_PASS, GATHER 0, GATHER 1 2, WAIT 0"
    assert second == "GATHER, WAIT 1"  # of the next one: it has been sent
