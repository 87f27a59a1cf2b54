"""``loss.backward(inputs=...)`` and ``torch.autograd.grad`` by parameters, as scripts for DDP do.

GANs train one of two models by ``inputs``; VQGAN weighs its losses by gradients of its last layer.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.testing import run_ranks

from .helpers import (
    assert_bit_equal,
    averaged_gradients,
    full,
    full_gradients,
    full_parameters,
    shard_units,
)

WIDTH = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "reshard_after_forward": {"reshard_after_forward": True},
    "zero1": {"sharding": "zero1"},
    "ddp": {"sharding": "ddp"},
}


class Pair(nn.Module):
    """A generator of two units, a critic, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.critic = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.critic(self.generator(x))) * self.scale


def made(options: dict[str, Any]) -> tuple[Pair, Pair]:
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(Pair())
    plain, sharded = models
    shard_units(sharded, [sharded.generator[0], sharded.generator[2], sharded.critic], **options)
    return plain, sharded


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_they_train_as_under_ddp(options: dict[str, Any]) -> None:
    run_ranks(check_backward, 2, options)
    run_ranks(check_grad, 2, options)


def test_so_they_do_with_replicas() -> None:
    run_ranks(check_replicas, 4)


def check_replicas() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for row in ("hsdp", "hsdp_zero1"):
        check_grad({"mesh": mesh, "sharding": row}, rtol=1e-5, atol=1e-6)


def check_backward(options: dict[str, Any]) -> None:
    plain, sharded = made(options)
    for step in range(4):
        for model in (plain, sharded):
            loss = model(batch(step)).square().mean()
            if step == 0:
                loss.backward(inputs=list(model.parameters()))
                continue
            trained = model.generator if step % 2 else model.critic
            loss.backward(inputs=[*trained.parameters()], retain_graph=True)
            loss.backward(inputs=model.scale)
        assert_bit_equal(full_gradients(sharded), averaged_gradients(plain))
        for model in (plain, sharded):
            model.zero_grad()


def check_grad(options: dict[str, Any], rtol: float = 0, atol: float = 0) -> None:
    plain, sharded = made(options)
    params = [list(model.parameters()) for model in (plain, sharded)]
    for step in range(3):
        found: list[list[Tensor]] = []
        for model, (scale, _, _, shard, *_, bias) in zip((plain, sharded), params, strict=True):
            y = model(batch(step))
            # Where it stays unsharded, the attribute is what this forward has computed with.
            weight, last = model.generator[2].weight, [bias, scale]
            first = torch.autograd.grad(y.square().mean(), weight, retain_graph=True)
            rest = torch.autograd.grad(y.mean(), last, retain_graph=True)
            named = torch.autograd.grad(y.sum(), {"w": weight}, retain_graph=True)["w"]
            unused = torch.autograd.grad(
                model.generator(batch(step)).sum(), [shard, *last], allow_unused=True
            )
            assert unused[1] is unused[2] is None
            y.mean().backward()
            found.append([*first, *rest, named, unused[0]])
        for one, other in zip(*found, strict=True):
            if isinstance(other, DTensor):  # else of an unsharded parameter, and of this rank
                dist.all_reduce(one)
                one /= dist.get_world_size()
            torch.testing.assert_close(full(other), one, rtol=rtol, atol=atol)
        expected = averaged_gradients(plain)
        for name, found_gradient in full_gradients(sharded).items():
            torch.testing.assert_close(found_gradient, expected[name], rtol=rtol, atol=atol)
        for model in (plain, sharded):
            model.zero_grad()


class Branch(nn.Module):
    """The first rank alone runs the unit; the others only what the input goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * (self.unit(x) if dist.get_rank() == 0 else x)


def check_left_out() -> None:
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = "2"
    model = Branch()
    shard_units(model, [model.unit])
    loss = model(batch(0).requires_grad_()).mean()
    if dist.get_rank() == 0:
        with pytest.raises(RankMismatchError, match="rank 1 did not come to compare the next step"):
            loss.backward(inputs=list(model.parameters()))
    else:  # autograd has nothing to do, and so does not tell of this backward
        loss.backward(inputs=list(model.parameters()))
        time.sleep(4)


def test_a_rank_waits_for_one_that_has_left_all_of_them_out() -> None:
    run_ranks(check_left_out, 2)


def check_penalty_by_inputs() -> None:
    _, sharded = made({})
    for step in range(3):
        loss = sharded(batch(step)).mean()
        params = list(sharded.parameters())
        penalty = sum(param.square().sum() for param in params)
        penalty.backward(inputs=params)  # which the model has no part in
        expected = {name: 2 * each for name, each in full_parameters(sharded).items()}
        assert_bit_equal(full_gradients(sharded), expected)
        loss.backward()
        sharded.zero_grad()


def test_a_backward_of_a_penalty_leaves_the_model_alone() -> None:
    run_ranks(check_penalty_by_inputs, 2)


def test_a_penalty_on_shards_is_differentiated_by_itself_and_in_a_loss() -> None:
    run_ranks(check_penalty, 2)


def check_penalty() -> None:
    plain, sharded = made({})
    weight = sharded.critic.weight
    y = sharded(batch(0)).sum()
    (grad,) = torch.autograd.grad(weight.square().sum(), weight)
    assert torch.equal(grad.full_tensor(), 2 * weight.full_tensor())  # type: ignore[attr-defined]
    (grad,) = torch.autograd.grad(y + weight.square().sum(), weight)  # in the loss in two ways
    plain(batch(0)).sum().backward()
    expected = averaged_gradients(plain)["critic.weight"] + 2 * plain.critic.weight.detach()
    torch.testing.assert_close(grad.full_tensor(), expected)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(sharded.generator(batch(0)).sum(), weight)
