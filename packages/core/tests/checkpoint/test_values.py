from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, deque, namedtuple
from enum import IntEnum
from typing import Any

import pytest
import torch

from vescale_fsdp import CheckpointCorruptError
from vescale_fsdp.checkpoint.encoding import decode, encode
from vescale_fsdp.checkpoint.manifest import from_json, to_json
from vescale_fsdp.errors import CheckpointValueError


def there_and_back(value: Any) -> Any:
    encoded, tensors = encode(value, "extra")
    return decode(from_json(to_json(encoded)), tensors.__getitem__, "extra")


EXACT = [
    None,
    True,
    0,
    -1,
    2**63,
    -(2**64),
    10**5000,
    1.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    "",
    "$tensor",
    'ä"\n\0\ud800',
    b"",
    b"\x00\xff",
    [],
    (),
    (1, (2.0, [3])),
    {},
    {"a": {"b": None}},
    {1: "x", (2, 3): "y", None: 0, 1.5: b""},
    {"$bytes": "YWI=", "other": 1},
    OrderedDict(b=1, a=2),
    Counter({30: 2, 10: 1}),
    deque([1, 2]),
    torch.Size([2, 3]),
    torch.bfloat16,
]


@pytest.mark.parametrize("value", EXACT, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = there_and_back(value)
    assert type(found) is type(value)
    assert found == value
    if isinstance(value, dict):
        assert list(found.items()) == list(value.items())
        assert [type(key) for key in found] == [type(key) for key in value]


@pytest.mark.parametrize("bits", ["7ff8000000000000", "fff8000000000001", "7ff0000000000000"])
def test_floats_that_json_does_not_know_keep_their_bits(bits: str) -> None:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert struct.pack(">d", there_and_back([value])[0]).hex() == bits


def test_the_zero_below_zero_keeps_its_sign() -> None:
    assert math.copysign(1.0, there_and_back(-0.0)) == -1.0


def test_tensors_are_named_and_come_back_by_their_names() -> None:
    a, b, c = torch.ones(2), torch.zeros(()), torch.ones(0)
    value = {"t": [a, (b,)], "t.0": c}
    encoded, tensors = encode(value, "extra")
    assert list(tensors) == ["extra.t.0", "extra.t.1.0", "extra.t.0~2"]
    found = decode(encoded, tensors.__getitem__, "extra")
    assert found["t"][0] is a
    assert found["t"][1][0] is b
    assert found["t.0"] is c


class Level(IntEnum):
    LOW = 1


Point = namedtuple("Point", "x y")
LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"extra\['a'\]\[1\] is a builtins.set"),
        ({"f": print}, r"extra\['f'\] is a builtins.builtin_function_or_method"),
        ({"e": Level.LOW}, r"extra\['e'\] is a .*Level"),
        ({"p": Point(1, 2)}, r"extra\['p'\] is a .*Point"),
        ({"z": 1j}, r"extra\['z'\] is a builtins.complex"),
        ({"d": deque(maxlen=2)}, r"extra\['d'\] is a collections.deque"),
        ({"m": torch.nn.Linear(1, 1)}, r"extra\['m'\] is a torch.nn.modules.linear.Linear"),
        ({object(): 1}, r"extra\['key'\] is a builtins.object"),
        ({"\ud800": torch.ones(1)}, "a key that is not valid Unicode"),
        (LOOP, "nested more than 100 deep, or contains itself"),
    ],
)
def test_what_would_need_pickle_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(CheckpointValueError, match=message):
        encode(value, "extra")


def test_a_numpy_number_is_refused_with_the_way_out() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(CheckpointValueError, match=r"extra\['loss'\] is a numpy.*\.item\(\)"):
        encode({"loss": numpy.float64(1.0)}, "extra")


@pytest.mark.parametrize(
    "value",
    [
        {"$call": "os.system"},
        {"$int": "twelve"},
        {"$bytes": "*"},
        {"$float": "00"},
        {"$dtype": "load"},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$tuple": None},
    ],
)
def test_json_that_we_do_not_write_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointCorruptError, match="extra holds"):
        decode(value, {}.__getitem__, "extra")
