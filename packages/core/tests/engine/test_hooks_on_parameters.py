"""Hooks of users on parameters: ``register_hook`` and ``register_post_accumulate_grad_hook``.

Masks of rows that are not to be trained are such. They may be older than ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_fsdp import MixedPrecisionPolicy, fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import assert_bit_equal, averaged_gradients, full, full_gradients

WIDTH = 6


class Model(nn.Module):
    """The weight of the second layer is that of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.layers[2].weight = self.layers[1].weight
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def mask(gradient: Tensor) -> Tensor:
    kept = torch.zeros_like(gradient)
    kept[0] = 1
    return gradient * kept


def double_in_place(gradient: Tensor) -> None:
    gradient.mul_(2)


def put_hooks(model: Model) -> list[Any]:
    """Returns the handles of those that are removed later."""
    model.scale.register_hook(double_in_place)
    model.layers[1].weight.register_hook(clamp)
    handle = model.layers[1].weight.register_hook(mask)
    model.layers[0].weight.register_hook(mask)
    return [handle, model.layers[0].bias.register_hook(mask)]


def make() -> Model:
    torch.manual_seed(3)
    return Model()


def shard(model: Model, **options: Any) -> None:
    fully_shard(model.layers[0], **options)
    fully_shard([model.layers[1], model.layers[2]], **options)
    fully_shard(model, **options)


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_they_get_the_gradient_of_each_rank_as_under_ddp(before: bool, row: str) -> None:
    run_ranks(check_gradients, 2, before, {"sharding": row})


def check_gradients(before: bool, options: dict[str, Any]) -> None:
    plain, sharded = make(), make()
    handles = put_hooks(plain)
    if before:
        handles += put_hooks(sharded)
    shard(sharded, **options)
    if not before:
        handles += put_hooks(sharded)
    for step in range(4):
        x = torch.randn(3, WIDTH)
        for model in (plain, sharded):
            model(x).square().sum().backward()
        assert_bit_equal(full_gradients(sharded), averaged_gradients(plain))
        for model in (plain, sharded):
            model.zero_grad()
        if step == 1:
            for handle in handles:
                handle.remove()


def test_those_after_accumulation_are_called_with_the_averaged_gradient() -> None:
    run_ranks(check_accumulated, 2)


def check_accumulated() -> None:
    model = make()
    seen: list[Tensor] = []

    def note(param: Tensor) -> None:
        assert param.grad is not None
        seen.append(full(param.grad))

    handle = model.scale.register_post_accumulate_grad_hook(note)
    shard(model)
    for step in range(3):
        model(torch.randn(3, WIDTH)).square().sum().backward()
        assert len(seen) == min(step + 1, 2)
        if step < 2:
            assert model.scale.grad is not None
            assert torch.equal(seen[-1], full(model.scale.grad))
        if step == 1:
            handle.remove()
        model.zero_grad()


def test_a_hook_may_return_another_dtype() -> None:
    run_ranks(check_dtype, 2)


def check_dtype() -> None:
    model = make()
    shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.scale.register_hook(lambda gradient: gradient.float() * 0)
    model(torch.randn(3, WIDTH)).square().sum().backward()
    assert model.scale.grad is not None
    assert not full(model.scale.grad).any()


def test_a_gradient_of_another_shape_is_refused() -> None:
    run_ranks(check_shape, 2)


def check_shape() -> None:
    model = make()
    shard(model)
    take: Callable[[Tensor], Tensor] = partial(torch.narrow, dim=0, start=0, length=1)
    model.scale.register_hook(take)
    with pytest.raises(RuntimeError, match=r"a hook on 'scale' .* shape \(1,\); expected \(6,\)"):
        model(torch.randn(3, WIDTH)).square().sum().backward()


def check_between() -> None:
    """Autograd calls them when it comes to the shard, which has no gradient yet."""
    models = [make(), make()]
    shard(models[1])
    x = torch.randn(4, WIDTH)
    for model in models:
        loss = model(x).square().sum()
        put_hooks(model)
        loss.backward()
    for name, gradient in full_gradients(models[1]).items():
        torch.testing.assert_close(gradient, models[0].get_parameter(name).grad)


def test_they_may_be_put_on_between_a_forward_and_its_backward() -> None:
    run_ranks(check_between, 1)
