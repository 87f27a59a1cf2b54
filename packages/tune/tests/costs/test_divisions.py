"""Joined and split units, by hand."""

from __future__ import annotations

from vescale_fsdp_tune.costs.divisions import grouped, split
from vescale_fsdp_tune.costs.model import FP32, Event, Group, Tensor, make_model
from vescale_fsdp_tune.costs.problem import BlockTimes, Division

from .problems import MIB, division, group


def test_neighbours_are_one_unit() -> None:
    pairs = grouped(division(5), 2)
    assert pairs is not None
    model = pairs.model
    assert model.modules == (
        (),
        ("blocks.0", "blocks.1"),
        ("blocks.2", "blocks.3"),
        ("blocks.4",),
    )
    assert [unit.title for unit in model.units] == [
        "root",
        "blocks.0-1 to blocks.2-3",
        "blocks.4",
    ]
    assert [unit.count for unit in model.units] == [1, 2, 1]
    assert model.num_parameters == division(5).model.num_parameters
    assert [times.forward_s for times in pairs.times] == [0.25e-3, 2e-3, 1e-3]
    names = [tensor.name for tensor in model.units[1].groups[0].tensors]
    assert names == ["0.w0", "0.w1", "0.w2", "1.w0", "1.w1", "1.w2"]


def test_the_trace_of_a_joined_unit_is_from_its_first_to_its_last() -> None:
    pairs = grouped(division(4, activation_bytes=MIB), 2)
    assert pairs is not None
    moments = pairs.traces["keep"].moments
    events = [
        (m.event, m.unit, m.live_bytes // MIB) for m in moments if m.event is not Event.GRADIENT
    ]
    assert events == [
        (Event.FORWARD, 0, 0),
        (Event.FORWARD, 1, 0),
        (Event.END_OF_FORWARD, 1, 2),
        (Event.FORWARD, 2, 2),
        (Event.END_OF_FORWARD, 2, 4),
        (Event.END_OF_FORWARD, 0, 4),
        (Event.BACKWARD, 0, 4),
        (Event.BACKWARD, 2, 4),
        (Event.END_OF_BACKWARD, 2, 2),
        (Event.BACKWARD, 1, 2),
        (Event.END_OF_BACKWARD, 1, 0),
        (Event.END, 0, 0),
    ]
    gradients = [m for m in moments if m.event is Event.GRADIENT]
    assert sum(m.num_elements for m in gradients) == pairs.model.num_parameters
    assert max(m.highest_bytes for m in moments) == 5 * MIB  # the root's own one on top


def test_groups_of_one_kind_are_joined() -> None:
    frozen = group((8, 8), trainable=False)
    first, second = [group((4, 4)), frozen], [frozen, group((2, 2))]
    model = make_model("m", [], [("a", first), ("b", second)])
    both = grouped(Division(model, (BlockTimes(0, 0, 0),) * 3), 2)
    assert both is not None
    (_, unit) = both.model.units
    assert [(each.trainable, each.numel) for each in unit.groups] == [(True, 20), (False, 128)]


def test_units_that_run_twice_are_not_joined() -> None:
    usual = division(2)
    keep = usual.traces["keep"]
    twice = Division(usual.model, usual.times, {"keep": type(keep)(keep.moments + keep.moments)})
    assert grouped(twice, 2) is None


EXPERTS = Group(
    (
        Tensor("attn.q.weight", (10, 10)),
        *(Tensor(f"mlp.experts.{i}.{name}.weight", (10, 20)) for i in range(4) for name in "ud"),
        Tensor("norm", (10,)),
    ),
    FP32,
)


def test_a_huge_unit_is_split_into_its_children() -> None:
    model = make_model("m", [], [("layer.0", [EXPERTS]), ("layer.1", [EXPERTS])])
    parts = split(Division(model, (BlockTimes(0, 0, 0), BlockTimes(171.0, 342.0, 171.0))), 900)
    assert parts is not None
    assert parts.model.modules[1:4] == (
        ("layer.0.attn", "layer.0.mlp.experts.0", "layer.0.mlp.experts.1"),
        ("layer.0.mlp.experts.2", "layer.0.mlp.experts.3", "layer.0.norm"),
        ("layer.1.attn", "layer.1.mlp.experts.0", "layer.1.mlp.experts.1"),
    )
    assert parts.model.num_parameters == model.num_parameters
    assert [times.forward_s for times in parts.times] == [0.0, 90.0, 81.0]
    assert split(Division(model, (BlockTimes(0, 0, 0),) * 2), 1710) is None  # nothing is larger


def test_a_tensor_is_not_split() -> None:
    model = make_model("m", [], [("layer", [group((10, 10), (10, 20))])])
    parts = split(Division(model, (BlockTimes(0, 0, 0),) * 2), 50)
    assert parts is not None
    sizes = [unit.groups[0].numel for unit in parts.model.units[1:]]
    assert sizes == [100, 200]


def test_with_traces_units_are_not_split() -> None:
    assert split(division(2), 10) is None
