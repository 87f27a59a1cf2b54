"""What is under way beside the unit whose backward runs: a reduction, then a gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from vescale_fsdp.engine.gather import Gathered
from vescale_fsdp.engine.reduce import Gradients
from vescale_fsdp.engine.unit import Unit, units_in
from vescale_fsdp.testing import run_ranks

from .helpers import shard_units

pytestmark = pytest.mark.usefixtures("each_alone")

NUM_BLOCKS, WIDTH = 4, 4


class Block(nn.Module):
    """Two layers: the gradient of the second is the first half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def blocks_of(**options: Any) -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    return shard_units(model, list(model), **options)


def events_of_a_backward(model: nn.Module) -> list[str]:
    """Gathers that begin, gradients of a half, reductions that begin and that have landed."""
    events: list[str] = []

    def noting(what: str, method: Callable[..., Any], name: Callable[[Any], str]) -> Any:
        def noted(self: Any, *args: Any, **options: Any) -> Any:
            if what != "landed" or self._reducing is not None:
                events.append(f"{what} {name(self)}")
            return method(self, *args, **options)

        return noted

    loss = model(torch.ones(1, WIDTH, requires_grad=True)).sum()
    owners = {id(g.gradients): unit.fqn for unit in units_in(model).values() for g in unit.groups}
    take = Gathered.take

    def gradients(self: Gathered, node: Any, place: int, grads: Any) -> Any:
        events.append(f"gradient {self.unit.fqn}")
        return take(self, node, place, grads)

    def of_gradients(gradients: Gradients) -> str:
        return owners[id(gradients)]

    started = noting("gather", Unit.start_unshard, lambda unit: unit.fqn)
    reduces = noting("reduce", Gradients.start_reduce, of_gradients)
    landed = noting("landed", Gradients.finish_reduce, of_gradients)
    with (
        mock.patch.object(Unit, "start_unshard", started),
        mock.patch.object(Gradients, "start_reduce", reduces),
        mock.patch.object(Gradients, "finish_reduce", landed),
        mock.patch.object(Gathered, "take", gradients),
    ):
        loss.backward()
    return events


def of_block(events: list[str], block: int) -> list[str]:
    """From the end of the block after it to its own."""
    begin, end = (events.index(f"reduce {number}") for number in (block + 1, block))
    return events[begin : end + 1]


def check_turns() -> None:
    model = blocks_of()
    for _ in range(2):  # the first records the order
        events = events_of_a_backward(model)
    assert of_block(events, 1) == [
        "reduce 2",
        "gather 1",  # under way since block 2, whose backward it waited half of
        "gradient 1",
        "landed 2",
        "gather 0",
        "gradient 1",
        "reduce 1",
    ]


def check_no_turns() -> None:
    """With a number of reductions that somebody has set, gathers wait for nothing."""
    model = blocks_of()
    model.set_reduce_scatter_max_input_buffers(1)
    for _ in range(2):
        events = events_of_a_backward(model)
    assert of_block(events, 1)[:4] == ["reduce 2", "gather 1", "gather 0", "gradient 1"]


def check_frozen_parts() -> None:
    """Adapters beside frozen weights: gradients are small, and gathers wait for nothing."""
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    for block in model:
        block.first.requires_grad_(False)
    shard_units(model, list(model))
    for _ in range(2):
        events = events_of_a_backward(model)
    assert of_block(events, 1)[:4] == ["reduce 2", "gather 1", "gather 0", "gradient 1"]


def check_room_for_two() -> None:
    """One gather and one reduction at any time."""
    model = blocks_of(in_flight=3)
    for _ in range(2):
        events = events_of_a_backward(model)
    assert of_block(events, 1) == [
        "reduce 2",
        "gather 1",
        "gather 0",
        "gradient 1",
        "gradient 1",
        "landed 2",
        "reduce 1",
    ]


def check_all() -> None:
    for check in (check_turns, check_no_turns, check_frozen_parts, check_room_for_two):
        check()


def test_gathers_and_reductions_take_turns() -> None:
    run_ranks(check_all, 2)
