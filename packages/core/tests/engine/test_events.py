"""The order of events in a step: gathers, forwards, releases, backwards, reductions.

Most tests state a whole sequence. They look at the second step: the first one records the order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import MixedPrecisionPolicy, fully_shard
from vescale_fsdp.engine.unit import unit_of
from vescale_fsdp.ranks import waits
from vescale_fsdp.testing import run_ranks

from .event_models import (
    Checkpointed,
    Events,
    Layer,
    Reentrant,
    Shard,
    Stack,
    evaluate,
    events_of,
    events_of_second,
    mark_backward,
    sharded,
    step,
    step_with_gradient_of_the_input,
)
from .models import make
from .recorders import mark

pytestmark = [
    pytest.mark.usefixtures("each_alone"),
    pytest.mark.filterwarnings("ignore:.* has no effect here"),  # test_without_effect
]


def assert_events(find: Callable[..., Events], expected: str, *args: object) -> None:
    """Both ranks see these events; in ``expected`` they are separated by commas."""
    for found in run_ranks(find, 2, *args, timeout_s=30):
        assert ", ".join(found) == " ".join(expected.split())


# Forward and backward of a unit


def step_of(options: dict[str, Any]) -> Events:
    return events_of_second(sharded(**options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            """gather root, gather a, forward root, gather b, forward a, free a, gather c,
            forward b, free b, forward c, free c, loss,
            gather c, backward root, gather b, backward c, free c, reduce c, gather a, backward b,
            free b, reduce b, backward a, free a, reduce a, free root, reduce root, end""",
        ),
        (
            {"reshard_after_forward": True},
            """gather root, gather a, forward root, gather b, forward a, free a, gather c,
            forward b, free b, forward c, free c, free root, loss,
            gather root, gather c, backward root, gather b, backward c, free c, reduce c, gather a,
            backward b, free b, reduce b, backward a, free a, reduce a, free root, reduce root,
            end""",
        ),
        (
            {"reshard_after_forward": False},
            """gather root, gather a, forward root, gather b, forward a, gather c, forward b,
            forward c, loss,
            backward root, backward c, free c, reduce c, backward b, free b, reduce b, backward a,
            free a, reduce a, free root, reduce root, end""",
        ),
        (
            {"in_flight": 1},
            """gather root, forward root, gather a, forward a, free a, gather b, forward b, free b,
            gather c, forward c, free c, loss,
            backward root, gather c, backward c, free c, reduce c, gather b, backward b, free b,
            reduce b, gather a, backward a, free a, reduce a, free root, reduce root, end""",
        ),
    ],
    ids=["default", "released", "kept", "no_prefetch"],
)
def test_the_next_gather_begins_before_a_unit_runs_and_its_reduction_before_the_next_unit_runs(
    options: dict[str, Any], expected: str
) -> None:
    # The root and a have no input that wants a gradient. They are reduced as the others are.
    assert_events(step_of, expected, options)


def first_forward() -> Events:
    return events_of(sharded(), lambda model: model(torch.ones(2, 16)))


def test_the_first_forward_gathers_each_unit_when_it_runs() -> None:
    expected = """gather root, forward root, gather a, forward a, free a, gather b, forward b,
        free b, gather c, forward c, free c, end"""
    assert_events(first_forward, expected)


def step_to_a_layer_before(model: Stack) -> None:
    x = torch.ones(2, 16, requires_grad=True) * 2.0
    x.register_hook(lambda _: mark("before"))
    model(x).sum().backward()


def backward_to_a_layer_before() -> Events:
    events = events_of_second(sharded(), step_to_a_layer_before)
    return events[events.index("backward b") :]


def test_a_unit_is_released_and_reduced_before_its_gradients_go_on_to_what_was_before_it() -> None:
    expected = """backward b, free b, reduce b, backward a, free a, reduce a, free root,
        reduce root, before, end"""
    assert_events(backward_to_a_layer_before, expected)


def backward_to_the_input() -> Events:
    events = events_of_second(sharded(), step_with_gradient_of_the_input)
    return events[events.index("backward a") :]


def test_a_leaf_gets_its_gradient_first() -> None:
    # Autograd gives gradients to leaves before it runs any other node that is ready.
    expected = "backward a, input, free a, reduce a, free root, reduce root, end"
    assert_events(backward_to_the_input, expected)


def called_twice(model: Stack) -> None:
    loss = model(torch.ones(2, 16)).sum() + model(torch.zeros(2, 16)).sum()
    mark("loss")
    loss.backward()


def backward_of_two_calls() -> Events:
    events = events_of_second(sharded(), called_twice)
    return events[events.index("loss") :]


def test_units_called_twice_are_gathered_once_in_backward_and_reduced_after_the_last_call() -> None:
    expected = """loss, gather c, backward root, gather b, backward c, gather a, backward b,
        backward a, backward root, backward c, free c, reduce c, backward b, free b, reduce b,
        backward a, free a, reduce a, free root, reduce root, end"""
    assert_events(backward_of_two_calls, expected)


def step_with_checkpoints(model_class: type[Stack]) -> Events:
    events = events_of_second(sharded(model_class))
    return events[events.index("loss") :]


@pytest.mark.parametrize("model_class", [Checkpointed, Reentrant])
def test_recomputation_uses_the_gather_of_backward_and_releases_nothing(
    model_class: type[Stack],
) -> None:
    expected = """loss, gather c, backward root, gather b, forward c, backward c, free c, reduce c,
        gather a, forward b, backward b, free b, reduce b, backward a, free a, reduce a,
        free root, reduce root, end"""
    assert_events(step_with_checkpoints, expected, model_class)


# Several modules in a unit, units in units


def step_with_a_list() -> Events:
    model = make(Stack)
    fully_shard(model.a)
    fully_shard([model.b, model.c])
    fully_shard(model)
    step(model)
    sizes = {"a": 272, "b+c": 544 + 1584, "root": 48}
    return events_of(model, sizes=sizes, units={"a": model.a, "b+c": model.b, "root": model})


def test_a_list_of_modules_is_gathered_before_its_first_and_released_after_its_last() -> None:
    expected = """gather root, gather a, forward root, gather b+c, forward a, free a, forward b,
        forward c, free b+c, loss,
        gather b+c, backward root, gather a, backward c, backward b, free b+c, reduce b+c,
        backward a, free a, reduce a, free root, reduce root, end"""
    assert_events(step_with_a_list, expected)


class Outer(nn.Module):
    """A unit with a parameter before the unit in it, and one after."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer("inner", 16, 16)
        self.before, self.after = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        mark("forward outer")
        x = self.inner(mark_backward(x * self.before, "outer, first part"))
        return mark_backward(x * self.after, "outer, second part").sin()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer, self.last = Outer(), Layer("last", 16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.outer(x))


def step_of_nested() -> Events:
    model = make(Nested)
    units = {"inner": model.outer.inner, "outer": model.outer, "last": model.last}
    for unit in (*units.values(), model):
        fully_shard(unit)
    step(model)
    return events_of(model, units=units, sizes={"inner": 272, "outer": 32, "last": 544})


def test_a_unit_around_another_is_gathered_and_released_around_it() -> None:
    expected = """gather outer, gather inner, forward outer, gather last, forward inner, free inner,
        free outer, forward last, free last, loss,
        gather last, gather outer, backward last, free last, reduce last,
        backward outer, second part, gather inner, backward inner, free inner, reduce inner,
        backward outer, first part, free outer, reduce outer, end"""
    assert_events(step_of_nested, expected)


# What the user asks for


def step_with_lists() -> Events:
    model = sharded()
    model.set_modules_to_forward_prefetch([model.a, model.b])
    model.a.set_modules_to_forward_prefetch([model.c])
    model.set_modules_to_backward_prefetch([model.c, model.b])
    model.c.set_modules_to_backward_prefetch([])
    return events_of_second(model)


def test_prefetch_lists_are_gathered_in_their_order_when_the_unit_begins() -> None:
    expected = """gather root, gather a, gather b, forward root, gather c, forward a, free a,
        forward b, free b, forward c, free c, loss,
        gather c, gather b, backward root, backward c, free c, reduce c, gather a, backward b,
        free b, reduce b, backward a, free a, reduce a, free root, reduce root, end"""
    assert_events(step_with_lists, expected)


def step_with_frozen_layers() -> Events:
    model = make(Stack)
    for frozen in (model.b, model.c):
        frozen.requires_grad_(False)
    for unit in model.units.values():
        fully_shard(unit)
    events = events_of_second(model)
    return events[events.index("loss") :]


def test_frozen_units_are_gathered_on_the_way_of_a_gradient_and_not_reduced() -> None:
    expected = """loss, gather c, backward root, gather b, backward c, free c, gather a,
        backward b, free b, backward a, free a, reduce a, free root, reduce root, end"""
    assert_events(step_with_frozen_layers, expected)


def second_evaluation() -> Events:
    model = sharded()
    step(model)
    return events_of_second(model, evaluate)


def test_evaluation_gathers_as_training_does_and_keeps_nothing() -> None:
    expected = """gather root, gather a, forward root, gather b, forward a, free a, gather c,
        forward b, free b, forward c, free c, free root, end"""
    assert_events(second_evaluation, expected)


def micro_batches(options: dict[str, Any], reshards: bool) -> list[Events]:
    """Two micro-batches without synchronization and one with it, in the second step of such."""
    model = sharded(**options)
    found: list[Events] = []
    for is_last in (False, False, True) * 2:
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        model.set_reshard_after_backward(is_last or reshards)
        found.append(events_of(model))
    return found[3:]


def assert_micro_batches(expected: list[str], *args: object) -> None:
    for found in run_ranks(micro_batches, 2, *args, timeout_s=30):
        assert [", ".join(events) for events in found] == [" ".join(e.split()) for e in expected]


FORWARD = """gather root, gather a, forward root, gather b, forward a, free a, gather c,
    forward b, free b, forward c, free c, loss,"""


def test_micro_batches_without_synchronization_gather_and_release_and_reduce_nothing() -> None:
    silent = """gather c, backward root, gather b, backward c, free c, gather a, backward b,
        free b, backward a, free a, free root, end"""
    last = """gather c, backward root, gather b, backward c, free c, reduce c, gather a, backward b,
        free b, reduce b, backward a, free a, reduce a, free root, reduce root, end"""
    expected = [f"{FORWARD} {silent}", f"{FORWARD} {silent}", f"{FORWARD} {last}"]
    assert_micro_batches(expected, {}, True)


SILENT = "backward root, backward c, backward b, backward a, end"
LAST = """backward root, backward c, free c, reduce c, backward b, free b, reduce b, backward a,
    free a, reduce a, free root, reduce root, end"""


def test_micro_batches_that_keep_everything_gather_once() -> None:
    first = """gather root, gather a, forward root, gather b, forward a, gather c, forward b,
        forward c, loss,"""
    later = "forward root, forward a, forward b, forward c, loss,"
    expected = [f"{first} {SILENT}", f"{later} {SILENT}", f"{later} {LAST}"]
    assert_micro_batches(expected, {"reshard_after_forward": False}, False)


def test_a_forward_uses_what_the_backward_before_it_has_kept() -> None:
    silent = """gather c, backward root, gather b, backward c, gather a, backward b, backward a,
        end"""
    last = """gather c, backward root, gather b, backward c, free c, reduce c, gather a, backward b,
        free b, reduce b, backward a, free a, reduce a, free root, reduce root, end"""
    later = """forward root, forward a, free a, forward b, free b, forward c, free c, loss,"""
    expected = [f"{FORWARD} {silent}", f"{later} {silent}", f"{later} {last}"]
    assert_micro_batches(expected, {}, False)


# The first forward, hooks of users, replicas


def rounds_through_the_store() -> list[int]:
    """How often each of four steps waits for another rank outside of collectives."""
    rounds = 0
    wait = waits.wait_for_keys

    def counted(*args: Any) -> None:
        nonlocal rounds
        rounds += 1
        wait(*args)

    model = sharded()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "wait_for_keys", counted)
        for _ in range(4):
            rounds = 0
            step(model)
            found.append(rounds)
    return found


def test_ranks_agree_in_the_first_step_only() -> None:
    for first, *later in run_ranks(rounds_through_the_store, 2):
        assert first > 0
        assert later == [0, 0, 0]


def check_roots() -> None:
    model = sharded()
    units = [unit_of(module) for module in model.units.values()]
    assert [unit.engine for unit in units] == [None] * 4
    step(model)
    engine = unit_of(model).engine
    for run in (step, evaluate, lambda model: model.b(torch.ones(2, 16)).sum().backward()):
        run(model)
        assert all(unit.engine is engine for unit in units)
        assert [unit.is_root for unit in units] == [False, False, False, True]


def test_the_first_forward_makes_the_root_for_good() -> None:
    run_ranks(check_roots, 2)


def seen_by_hooks(shard: Shard) -> dict[str, tuple[bool, torch.dtype]]:
    """Whether the weight is gathered, and the dtype of the input or output."""
    layer = nn.Linear(4, 4)
    seen = {}

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor | None = None) -> None:
            value = args[0] if output is None else output
            seen[name] = (type(module.weight.data) is Tensor, value.dtype)

        return hook

    layer.register_forward_pre_hook(look("before forward, older than ours"))
    layer.register_forward_hook(look("after forward, older than ours"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = nn.Sequential(shard(layer, mp_policy=policy))
    shard(model)
    layer.register_forward_pre_hook(look("before forward, newer"))
    layer.register_forward_pre_hook(look("before forward, put first"), prepend=True)
    layer.register_forward_hook(look("after forward, newer"))
    layer.register_forward_hook(look("after forward, put first"), prepend=True)
    model(torch.ones(2, 4))
    return seen


def seen_by_hooks_of_both() -> list[dict[str, tuple[bool, torch.dtype]]]:
    return [seen_by_hooks(shard) for shard in (fully_shard, torch_fully_shard)]


def test_hooks_of_users_run_inside_of_ours_unless_they_are_put_around_them() -> None:
    inside = (True, torch.bfloat16)
    expected = {
        "before forward, older than ours": inside,
        "before forward, newer": inside,
        "before forward, put first": (False, torch.float32),
        "after forward, older than ours": inside,
        "after forward, put first": inside,
        "after forward, newer": (False, torch.float64),
    }
    assert run_ranks(seen_by_hooks_of_both, 2) == [[expected, expected]] * 2


def step_with_replicas(max_input_buffers: int | None) -> Events:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    if max_input_buffers is not None:
        model.set_reduce_scatter_max_input_buffers(max_input_buffers)
    events = events_of_second(model)
    return [event for event in events if event.split()[0] not in ("forward", "gather", "free")]


@pytest.mark.parametrize(
    ("max_input_buffers", "rest"),
    [
        (None, "sum c, reduce b, backward a, sum b, reduce a, sum a, reduce root, sum root"),
        (1, "sum c, reduce b, backward a, sum b, reduce a, sum a, reduce root, sum root"),
        (2, "reduce b, backward a, sum c, reduce a, sum b, reduce root, sum a, sum root"),
    ],
)
def test_the_sum_over_replicas_comes_after_the_reduction_and_waits_for_no_other(
    max_input_buffers: int | None, rest: str
) -> None:
    # One reduction is under way at a time, unless the user has said how many: the next one lets it
    # go on to the replicas.
    expected = f"loss, backward root, backward c, reduce c, backward b, {rest}, end"
    for found in run_ranks(step_with_replicas, 4, max_input_buffers, timeout_s=30):
        assert ", ".join(found) == " ".join(expected.split())
