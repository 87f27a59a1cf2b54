"""Units and groups of a module are those that ``fully_shard`` makes."""

from __future__ import annotations

import pytest
from torch import nn

from vescale_fsdp import fully_shard, repeated_blocks
from vescale_fsdp.cli.text import InputError
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_tune.commands.modules import model_of_module, reason
from vescale_fsdp_tune.commands.settings import parse_dtype
from vescale_fsdp_tune.costs.model import Model

from .tiny import Shared, Tied, empty, lazy

Facts = list[list[tuple[str, bool, list[tuple[str, tuple[int, ...]]]]]]  # by unit and group


def plan_facts(model: Model) -> Facts:
    return [
        [
            (group.dtype.name, group.trainable, [(t.name, t.shape) for t in group.tensors])
            for group in model.units[index].groups
        ]
        for index in model.order
    ]


def engine_facts() -> Facts:
    model = Tied()
    for module in [*repeated_blocks(model), model]:
        fully_shard(module)
    return [
        [
            (
                str(group.buffer.shard.dtype).removeprefix("torch."),
                group.trainable,
                [(spec.name, spec.shape) for spec in group.layout.specs],
            )
            for group in unit.groups
        ]
        for unit in units_in(model).values()
    ]


def test_groups_are_those_of_the_engine() -> None:
    planned = plan_facts(model_of_module(Tied(), "tied", None))
    assert planned == run_ranks(engine_facts, 2)[0]
    assert planned[0] == [("float32", True, [("embed.weight", (10, 8))])]
    assert [(dtype, trainable) for dtype, trainable, _ in planned[3]] == [
        ("bfloat16", True),
        ("float32", False),
        ("float32", True),
    ]


def test_equal_layers_are_counted() -> None:
    model = model_of_module(Tied(), "tied", None)
    assert [(unit.title, unit.count) for unit in model.units] == [
        ("root", 1),
        ("layers.0-1", 2),
        ("layers.2", 1),
    ]


def test_a_dtype_replaces_that_of_floating_point_parameters() -> None:
    module = Tied()
    module.counts = nn.Parameter(module.embed.weight.detach().int(), requires_grad=False)
    model = model_of_module(module, "tied", parse_dtype("fp16", ""))
    dtypes = {group.dtype.name for unit in model.units for group in unit.groups}
    assert dtypes == {"float16", "int32"}


def test_a_parameter_of_several_units_is_the_roots() -> None:
    root, *layers = plan_facts(model_of_module(Shared(), "shared", None))
    assert root == [("float32", True, [("layers.0.weight", (4, 4))])]
    assert layers == [[("float32", True, [("bias", (4,))])]] * 2


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(InputError, match="none has no parameters to shard"):
        model_of_module(empty(), "none", None)


def test_a_parameter_without_a_shape_is_refused() -> None:
    with pytest.raises(InputError, match="parameter weight is lazy, it has no shape yet"):
        model_of_module(lazy(), "lazy", None)


def test_the_reason_of_an_error_is_in_one_line() -> None:
    assert reason(ValueError("Validation failed:\n\n    expected int,\n  got str")) == (
        "ValueError: Validation failed: expected int, got str"
    )
    assert reason(KeyError()) == "KeyError"


def test_a_long_reason_keeps_its_ends() -> None:
    text = reason(ValueError("first " + "x" * 5000 + " last"))
    assert text.startswith("ValueError: first x")
    assert text.endswith("x last")
    assert len(text) < 400


def test_the_place_of_an_error_is_in_the_users_code() -> None:
    try:
        nn.Linear(2, "wide")
    except TypeError as error:
        text = reason(error)
    assert "test_modules.py, line" in text
    assert "site-packages" not in text
