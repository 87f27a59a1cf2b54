"""Orders of collectives, and how they are filled with units that have not run: integers only."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vescale_fsdp.program.order import AT_THE_END, Program, Walk
from vescale_fsdp.program.predict import Names, backward_precedence, fill, insert_by
from vescale_fsdp.program.reductions import Reduction, Reductions

NAMES = ["", "a", "a.x", "a.y", "b", "b.x", "b.y", "c", "c.x", "c.y", "head"]
# As in a ModuleList: blocks.0, blocks.1, ...; a, b and c above stand for them.
_BLOCKS = {part: f"blocks.{'abc'.index(part)}" for part in "abc"}
UNITS = Names(
    [_BLOCKS.get(name[:1], name[:1]) + name[1:] for name in NAMES],
    ["Block" if name[:1] in ("a", "b", "c") else "Other" for name in NAMES],
)


def order_of(*names: str) -> Program:
    order = Program()
    for name in names:
        order.append(NAMES.index(name))
    return order


def names_in(order: Program) -> list[str]:
    return [NAMES[unit] for unit in order.unshards]


def fill_all(order: Program) -> list[str]:
    fill(order, UNITS, lambda i, known: UNITS.around(i) in known)
    return names_in(order)


def test_units_that_have_not_run_come_where_they_are_defined() -> None:
    assert fill_all(order_of("", "b", "b.x", "head")) == NAMES


def test_the_order_of_the_same_parts_in_another_block_is_followed() -> None:
    found = fill_all(order_of("", "a", "a.y", "a.x", "head"))
    assert found == ["", "a", "a.y", "a.x", "b", "b.y", "b.x", "c", "c.y", "c.x", "head"]


def filled_backward(*names: str, recomputed: tuple[str, ...] = ()) -> list[str]:
    program = order_of(*names)
    again = UNITS.like({NAMES.index(name) for name in recomputed})
    insert_by(backward_precedence(UNITS, order_of(*NAMES), again), program, range(len(NAMES)))
    return names_in(program)


def test_in_backward_what_the_forward_ran_later_comes_first() -> None:
    found = filled_backward("", "b", "b.x")
    assert found == ["", "head", "c", "c.y", "c.x", "b", "b.y", "b.x", "a", "a.y", "a.x"]


def test_parts_of_a_block_whose_forward_runs_again_come_forward_in_backward() -> None:
    found = filled_backward("", "head", "b", "b.x", recomputed=("b", "b.x"))
    assert found == ["", "head", "c", "c.x", "c.y", "b", "b.x", "b.y", "a", "a.x", "a.y"]


def test_a_method_for_a_part_expects_what_is_like_that_part() -> None:
    order = order_of("", "b", "b.x")
    fill(order, UNITS, UNITS.is_like)
    assert names_in(order) == ["", "a", "a.x", "a.y", "b", "b.x", "b.y", "c", "c.x", "c.y"]


@pytest.mark.parametrize("seed", range(20))
def test_any_part_of_the_order_of_definition_is_filled_to_all_of_it(seed: int) -> None:
    chance = random.Random(seed)
    ran = [name for name in NAMES if name == "" or chance.random() < 0.4]
    kept = [n for n in ran if "." not in n or n.split(".")[0] in ran]
    assert fill_all(order_of(*kept)) == NAMES


def test_a_reduction_keeps_its_distance_from_what_is_inserted() -> None:
    order = order_of("c", "b", "a")
    order.reductions = [(7, 1), (4, 2), (1, 3), (0, AT_THE_END)]
    order.insert(1, NAMES.index("c.x"))
    # That of c comes after the part that was inserted behind its gather.
    assert order.reductions == [(7, 2), (4, 3), (1, 4), (0, AT_THE_END + 1)]


def test_a_walk_yields_what_was_not_run_and_moves_past_it() -> None:
    walk = Walk(order_of("", "a", "b", "c", "a", "head"))
    for name in ("", "b"):
        walk.ran.setdefault(NAMES.index(name))
    place = walk.find(NAMES.index("c"))
    assert place == 3
    assert [NAMES[unit] for unit in walk.seek(place, again=False)] == ["a"]
    assert walk.place == 3
    assert [NAMES[unit] for unit in walk.ahead()] == ["c", "a", "head"]
    assert walk.find(NAMES.index("a")) == 4
    assert walk.find(NAMES.index("b")) is None
    walk.wrap(NAMES.index("b"))
    assert walk.place == 3


def test_a_unit_that_joins_an_order_is_found_the_next_time() -> None:
    walk = Walk(order_of("", "a", "head"))
    walk.place = 2
    walk.insert(NAMES.index("b"))
    assert names_in(walk.program) == ["", "a", "b", "head"]
    assert walk.place == 3
    assert Walk(walk.program).find(NAMES.index("b")) == 2


def test_a_thousand_experts_are_filled_in_at_once() -> None:
    names = [
        "",
        *(f"layers.{i}" + part for i in range(32) for part in ("", *map(".{}".format, range(31)))),
    ]
    units = Names(names, ["Other"] * len(names))
    order = Program()
    for index in range(0, len(names), 4):
        order.append(index)
    begin = time.process_time()
    fill(order, units, lambda i, known: units.around(i) in known)
    assert [names[unit] for unit in order.unshards] == names
    assert time.process_time() - begin < 5


class Noted(Reduction):
    """A group whose reductions are noted, with the place of the walk at which they begin."""

    has_gradients = False

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.unit = cast(
            Any,
            SimpleNamespace(index=NAMES.index(name), awaits_backward=False, has_streams=False),
        )

    def finish(self) -> None: ...

    def has_arrived(self) -> bool:
        return True


def test_a_gather_added_in_a_backward_moves_the_reductions_after_it() -> None:
    """A rank that leaves out "a" reduces it after its gather, which others wait for (fuzz 123)."""
    order = order_of("c", "b", "a")
    c, b, a, root = range(4)
    order.reductions = [(c, 1), (b, 2), (a, 3), (root, 3)]
    walk, begun = Walk(order), []
    due = [Noted(number, name) for number, name in ((c, "c"), (b, "b"), (a, "a"), (root, ""))]
    reductions = Reductions(
        due,
        walk,
        lambda unit: unit.index not in (NAMES.index("c"), 0),
        lambda batch: begun.extend((item.number, walk.place) for item in batch),
        None,
        1,
        1,
    )
    walk.insert(NAMES.index(""))  # it had been kept in the recorded pass
    reductions.proceed()
    for place in (2, 3, 4):
        walk.place = place
        reductions.complete(due[c].unit)
    reductions.complete_rest()
    assert begun == [(c, 2), (b, 3), (a, 4), (root, 4)]
