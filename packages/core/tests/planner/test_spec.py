"""TensorSpec: sizes, normal form and refusals."""

import dataclasses

import pytest

from vescale_fsdp.errors import PlanError
from vescale_fsdp.planner import TensorSpec


@pytest.mark.parametrize(
    ("shape", "numel"), [((), 1), ((5,), 5), ((2, 3, 4), 24), ((3, 0), 0), ((0,), 0)]
)
def test_numel(shape, numel):
    assert TensorSpec("w", shape, 1).numel == numel


def test_spec_is_frozen():
    spec = TensorSpec("w", (2,), 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.block = 2


class OtherInteger:
    """What NumPy and torch have: an integer that is no ``int``."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_other_integers_become_plain_ones():
    spec = TensorSpec("w", [OtherInteger(2), 3], OtherInteger(3))
    assert spec == TensorSpec("w", (2, 3), 3)
    assert type(spec.shape) is tuple
    assert {type(value) for value in (*spec.shape, spec.block)} == {int}


@pytest.mark.parametrize(
    ("shape", "block", "parts"),
    [
        ((4, -1), 1, ["'layer.w'", "dimension 1 is -1", "at least 0", "full shape"]),
        ((4, 1.5), 1, ["'layer.w'", "dimension 1 is 1.5", "an integer"]),
        (4, 1, ["'layer.w'", "shape is 4", "a tuple of integers", "(n,)"]),
        ((4,), 0, ["'layer.w'", "block is 0", "at least 1", "elements that must stay together"]),
        ((4,), 2.0, ["'layer.w'", "block is 2.0", "an integer"]),
    ],
)
def test_refusals_say_where_what_and_what_to_do(shape, block, parts):
    with pytest.raises(PlanError) as caught:
        TensorSpec("layer.w", shape, block)
    for part in parts:
        assert part in str(caught.value)
