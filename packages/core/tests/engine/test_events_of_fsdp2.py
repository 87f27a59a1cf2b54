"""The collectives of a step are those of FSDP2: as many and as large, gathers in the same order."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import MixedPrecisionPolicy, fully_shard
from vescale_fsdp.testing import run_ranks

from .event_models import (
    SIZES,
    Checkpointed,
    Events,
    Reentrant,
    Shard,
    Stack,
    evaluate,
    events_of,
    events_of_second,
    sharded,
    step,
    step_with_gradient_of_the_input,
)
from .models import make

pytestmark = [
    pytest.mark.usefixtures("each_alone"),
    pytest.mark.filterwarnings("ignore:.* has no effect here"),  # test_without_effect
]


def plain_step(shard: Shard) -> Events:
    return events_of_second(sharded(shard=shard))


def released_step(shard: Shard) -> Events:
    return events_of_second(sharded(shard=shard, reshard_after_forward=True))


def kept_step(shard: Shard) -> Events:
    return events_of_second(sharded(shard=shard, reshard_after_forward=False))


def one_unit(shard: Shard) -> Events:
    model = shard(make(Stack))
    step(model)
    return events_of(model, sizes={"root": sum(SIZES.values())}, units={"root": model})


def units_without_a_parameter_of_the_root(shard: Shard) -> Events:
    model = make(Stack)
    del model.scale
    model.scale = torch.ones(48)
    for module in model.units.values():
        shard(module)
    return events_of_second(model)


def list_of_modules(shard: Shard) -> Events:
    model = make(Stack)
    shard([model.a, model.c])
    shard(model)
    step(model)
    sizes = {"a+c": 272 + 1584, "b+root": 544 + 48}
    return events_of(model, sizes=sizes, units={"a+c": model.a, "b+root": model})


def frozen_layer(shard: Shard) -> Events:
    model = make(Stack)
    model.b.requires_grad_(False)
    for module in model.units.values():
        shard(module)
    return events_of_second(model)


def in_bf16(shard: Shard) -> Events:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return events_of_second(sharded(shard=shard, mp_policy=policy))


def to_the_input(shard: Shard) -> Events:
    return events_of_second(sharded(shard=shard), step_with_gradient_of_the_input)


def checkpointed(shard: Shard) -> Events:
    return events_of_second(sharded(Checkpointed, shard))


def reentrant(shard: Shard) -> Events:
    return events_of_second(sharded(Reentrant, shard))


def evaluation(shard: Shard) -> Events:
    return events_of_second(sharded(shard=shard, reshard_after_forward=True), evaluate)


def three_micro_batches(shard: Shard) -> Events:
    model = sharded(shard=shard)
    found = []
    for is_last in (True, False, False, True):
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        found += events_of(model)
    return found


def unsharded_beforehand(shard: Shard) -> Events:
    def run(model: Stack) -> None:
        model.b.unshard(async_op=True)
        step(model)

    return events_of_second(sharded(shard=shard), run)


def prefetch_lists(shard: Shard) -> Events:
    model = sharded(shard=shard)
    model.set_modules_to_forward_prefetch([model.a, model.b, model.c])
    model.set_modules_to_backward_prefetch([model.c, model.b, model.a])
    return events_of_second(model)


def with_replicas(shard: Shard) -> Events:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return events_of_second(sharded(shard=shard, mesh=mesh))


def parts_on_two_ranks(shard: Shard) -> Events:
    events = events_of_second(sharded(shard=shard, reshard_after_forward=2))
    return [event.split()[0] for event in events]  # on 4 ranks we pad, and FSDP2 does too


ON_TWO_RANKS = [
    plain_step,
    released_step,
    kept_step,
    one_unit,
    units_without_a_parameter_of_the_root,
    list_of_modules,
    frozen_layer,
    in_bf16,
    to_the_input,
    checkpointed,
    reentrant,
    evaluation,
    three_micro_batches,
    unsharded_beforehand,
    prefetch_lists,
]
ON_FOUR_RANKS = [with_replicas, parts_on_two_ranks]
COLLECTIVES = ("gather", "reduce", "sum")


def collectives_of_both(world_size: int) -> dict[str, list[Events]]:
    """The collectives of each scenario, of ours and of FSDP2."""
    scenarios = ON_TWO_RANKS if world_size == 2 else ON_FOUR_RANKS
    found = {}
    for scenario in scenarios:
        both = [scenario(shard) for shard in (fully_shard, torch_fully_shard)]
        found[scenario.__name__] = [
            [event for event in events if event.split()[0] in COLLECTIVES] for events in both
        ]
    return found


@functools.cache
def run_both(world_size: int) -> list[dict[str, list[Events]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_FSDP_REDUCE", "native")
        return run_ranks(collectives_of_both, world_size, world_size)


@pytest.mark.parametrize("scenario", [*ON_TWO_RANKS, *ON_FOUR_RANKS])
def test_gathers_are_those_of_fsdp2_in_their_order_and_reductions_are_the_same(
    scenario: Callable[[Shard], Events],
) -> None:
    for found in run_both(2 if scenario in ON_TWO_RANKS else 4):
        ours, theirs = found[scenario.__name__]
        assert len(ours) > 0
        gathers, expected = ([e for e in each if "gather" in e] for each in (ours, theirs))
        assert gathers == expected
        # FSDP2 reduces what is left at the end in order of definition.
        assert sorted(ours) == sorted(theirs)
