"""What stays gathered where a forward turns into its backward: ``in_flight - 2`` units."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.testing import run_ranks

from .helpers import (
    assert_bit_equal,
    averaged_gradients,
    full_gradients,
    shard_units,
)
from .models import MLP, inputs_of, make
from .recorders import Recorder

pytestmark = pytest.mark.usefixtures("each_alone")

NUM_BLOCKS = 5
IN_FLIGHT = 4


def gathered(model: nn.Module) -> list[str]:
    return [name for name, unit in units_in(model).items() if name and not unit.is_sharded]


def sharded_mlp(**options: object) -> nn.Module:
    model = make(MLP, NUM_BLOCKS)
    return shard_units(model, model.layers, **({"in_flight": IN_FLIGHT} | options))


def check_gathers() -> None:
    plain, model = make(MLP, NUM_BLOCKS), sharded_mlp()
    for step in range(4):
        plain.zero_grad()
        model.zero_grad()
        plain(inputs_of(step, dist.get_rank())).sum().backward()
        with Recorder() as recorder:
            loss = model(inputs_of(step, dist.get_rank())).sum()
            stays = gathered(model)
            num_forward = recorder.count("gathers")
            loss.backward()
        assert stays == ([] if step == 0 else ["layers.3", "layers.4"])  # 0 records the order
        assert num_forward == NUM_BLOCKS
        assert recorder.count("gathers") - num_forward == NUM_BLOCKS - len(stays)
        assert gathered(model) == []
        assert_bit_equal(full_gradients(model), averaged_gradients(plain))


def check_default() -> None:
    model = sharded_mlp(in_flight=2)
    for step in range(3):
        loss = model(inputs_of(step, 0)).sum()
        assert gathered(model) == []
        loss.backward()


def check_at_most_in_flight_at_a_time() -> None:
    """What stays has its place among those that are gathered ahead."""
    model = sharded_mlp()
    seen: list[int] = []
    for layer in model.layers:
        layer.register_full_backward_pre_hook(lambda *_: seen.append(len(gathered(model))))
    for step in range(3):
        seen.clear()
        model(inputs_of(step, 0).requires_grad_()).sum().backward()
    assert max(seen) <= IN_FLIGHT, seen


def check_without_backward() -> None:
    """An optimizer may step between: what an unused forward has left is not used again."""
    model = sharded_mlp()
    for step in range(2):
        model(inputs_of(step, 0)).sum().backward()
    model(inputs_of(2, 0))
    assert len(gathered(model)) == 2
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    out = model(inputs_of(2, 0))
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    with torch.no_grad():
        model(inputs_of(3, 0))
    assert gathered(model) == []


def check_two_forwards() -> None:
    plain, model = make(MLP, NUM_BLOCKS), sharded_mlp()
    for step in range(3):
        losses = []
        for each in (plain, model):
            each.zero_grad()
            first = each(inputs_of(step, dist.get_rank())).sum()
            with torch.no_grad():
                each(inputs_of(step + 1, 0))
            losses.append(first + each(inputs_of(step + 2, dist.get_rank())).sum())
        for loss in losses:
            loss.backward()
        assert_bit_equal(full_gradients(model), averaged_gradients(plain))
        assert gathered(model) == []


def check_not_where_a_backward_gathers_nothing() -> None:
    model = sharded_mlp()
    for step in range(2):
        model(inputs_of(step, 0)).sum().backward()
    model.layers[-1].set_unshard_in_backward(False)
    model(inputs_of(2, 0))
    assert gathered(model) == ["layers.3"]


class Recomputed(MLP):
    """Each layer runs again in the backward, on the ranks that run it."""

    def forward(self, x: torch.Tensor, layers: Sequence[int] = range(NUM_BLOCKS)) -> torch.Tensor:
        for number in layers:
            x = torch.tanh(checkpoint(self.layers[number], x, use_reentrant=True))
        return x


def check_recomputation() -> None:
    """Ranks that leave out layers, and micro-batches that are not reduced: another kind."""
    plain, model = make(Recomputed, NUM_BLOCKS), make(Recomputed, NUM_BLOCKS)
    shard_units(model, model.layers, in_flight=3)
    for step in range(5):
        random = Random(10 * step + dist.get_rank())
        for each in (plain, model):
            each.zero_grad()
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            layers = [number for number in range(NUM_BLOCKS) if random.random() < 0.7]
            for each in (plain, model):
                x = inputs_of(step, dist.get_rank()).requires_grad_()
                each(x, layers).sum().backward()
        found, expected = full_gradients(model), averaged_gradients(plain)
        for name, gradient in expected.items():
            other = found[name]
            if gradient is not None and other is not None:
                torch.testing.assert_close(other, gradient, rtol=1e-5, atol=1e-6, msg=name)
        assert gathered(model) == []


def check_unshard_after_a_step() -> None:
    """What a forward without a backward has left is not what a user asks for later."""
    model = sharded_mlp()
    for step in range(2):
        model(inputs_of(step, 0)).sum().backward()
    model(inputs_of(2, 0))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.layers[-1].unshard()
    assert torch.equal(model.layers[-1].weight, torch.zeros_like(model.layers[-1].weight))
    assert torch.equal(model(inputs_of(2, 0)), torch.zeros_like(model(inputs_of(2, 0))))


@pytest.mark.parametrize(
    "check",
    [
        check_gathers,
        check_default,
        check_at_most_in_flight_at_a_time,
        check_without_backward,
        check_two_forwards,
        check_not_where_a_backward_gathers_nothing,
        check_recomputation,
        check_unshard_after_a_step,
    ],
    ids=lambda check: check.__name__,
)
def test_where_a_forward_turns_into_its_backward(check: object) -> None:
    run_ranks(check, 2)
