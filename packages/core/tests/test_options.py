"""Options of adapters: what is accepted, what is refused in whose words, and what they become."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from vescale_fsdp import Granularity, QuantizedGather, QuantizedReduce, errors
from vescale_fsdp.options import (
    ACTIVATIONS,
    BUDGET,
    COUNT,
    FLAG,
    GATHER,
    GRANULARITY,
    REDUCE,
    arguments,
    check,
    check_budget,
    one_of,
    option,
)


@dataclass(kw_only=True)
class Options:
    granularity: Any = option(GRANULARITY, None, "rows:32 or whole")
    sharding: str = option(one_of("ddp", "zero3"), "zero3", "ddp or zero3")
    activations: Any = option(ACTIVATIONS, None, "recompute")
    gather_codec: Any = option(GATHER, None, "int8")
    reduce_codec: Any = option(REDUCE, None, "int8")
    budget: Any = option(BUDGET, None, "10GiB")
    replicas: int = option(COUNT, 1, "an int of at least 1")
    sealed: bool = option(FLAG, False, "true or false")
    other: object = None  # of somebody else: not checked


TEXT = "{name}: {value!r} does not work{reason}; accepted: {accepted}"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("granularity", "rows:32", Granularity.rows(32)),
        ("granularity", "elements:3", Granularity.elements(3)),
        ("granularity", "tile:4x8", Granularity.tile(4, 8)),
        ("granularity", "whole", Granularity.whole()),
        ("granularity", Granularity.rows(2), Granularity.rows(2)),
        ("granularity", None, None),
        ("sharding", "ddp", "ddp"),
        ("activations", "recompute+offload", "recompute+offload"),
        ("activations", [print], [print]),
        ("gather_codec", "e4m3", QuantizedGather("e4m3")),
        ("gather_codec", {"block": [32, 32]}, QuantizedGather(block=(32, 32))),
        ("gather_codec", QuantizedGather(), QuantizedGather()),
        ("reduce_codec", "int8", QuantizedReduce()),
        ("reduce_codec", {"dtype": "int8", "block": 8}, QuantizedReduce(block=8)),
        ("replicas", 2, 2),
        ("sealed", True, True),
    ],
)
def test_a_value_becomes_an_argument(name: str, value: object, expected: object) -> None:
    options = Options(**{name: value})  # type: ignore[arg-type]
    check(options, TEXT)
    assert arguments(options, name) == {name: expected}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("granularity", "rows:0", "'rows:0' does not work; accepted: rows:32 or whole"),
        ("granularity", 32, "granularity: 32 does not work; accepted: rows:32 or whole"),
        ("sharding", "zero4", "sharding: 'zero4' does not work; accepted: ddp or zero3"),
        ("sharding", None, "sharding: None does not work; accepted: ddp or zero3"),
        ("activations", "keep", "activations: 'keep' does not work; accepted: recompute"),
        ("gather_codec", {"blocks": 1}, "{'blocks': 1} does not work; accepted: int8"),
        ("gather_codec", QuantizedReduce(), "dtype must be 'int8' or 'e4m3'"),
        ("reduce_codec", "e4m3", "'e4m3' does not work (dtype must be 'int8'); accepted: int8"),
        ("reduce_codec", {"error_feedback": 1}, "1} does not work; accepted: int8"),
        ("replicas", True, "replicas: True does not work; accepted: an int of at least 1"),
        ("replicas", 0, "replicas: 0 does not work"),
        ("replicas", "", "replicas: '' does not work"),  # a template's variable that was not set
        ("sealed", "", "sealed: '' does not work"),
        ("granularity", "", "granularity: '' does not work"),
        ("sealed", "yes", "sealed: 'yes' does not work; accepted: true or false"),
    ],
)  # fmt: skip
def test_another_value_is_refused_in_the_given_words(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the text is compared below
        check(Options(**{name: value}), TEXT)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_what_a_budget_chooses_cannot_be_set_too() -> None:
    text = "{budget} chooses {name}, which is {value!r}"
    check_budget(Options(sharding="ddp"), ["sharding"], text)
    check_budget(Options(budget="80%"), ["sharding"], text)
    with pytest.raises(ValueError, match="80% chooses sharding, which is 'ddp'"):
        check_budget(Options(budget="80%", sharding="ddp"), ["sharding"], text)


def test_words_are_checked_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # importing torch now raises
        "from dataclasses import make_dataclass\n"
        "from vescale_fsdp.options import *\n"
        "fields = [('granularity', str, option(GRANULARITY, None, '')),"
        " ('gather_codec', str, option(GATHER, None, ''))]\n"
        "check(make_dataclass('Options', fields)(granularity='rows:2', gather_codec='int8'), '')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_budget_without_the_companion_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    expected = (
        "budget='80%' needs vescale_fsdp_tune, which is not installed: pip install "
        "'vescale-fsdp[tune]'"
    )
    with pytest.raises(ImportError) as error:
        check(Options(budget="80%"), TEXT)
    assert str(error.value) == expected
