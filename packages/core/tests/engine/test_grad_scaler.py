"""``torch.amp.GradScaler`` on sharded parameters: the same decision on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp.testing import run_ranks

from .helpers import assert_bit_equal, full_parameters, shard_units


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def step(model: nn.Module, scaler: torch.amp.GradScaler, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(x).square().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def check() -> None:
    ours, plain = make(), make()
    shard_units(ours, [ours[0]])
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for model, scaler in zip((ours, plain), scalers, strict=True):
        step(model, scaler, torch.ones(2, 5))
    assert_bit_equal(full_parameters(ours), full_parameters(plain))
    # The last rank alone has what is not finite; nobody steps, and all scales go down.
    before = full_parameters(ours)
    step(ours, scalers[0], torch.full((2, 5), float("inf") if dist.get_rank() else 1.0))
    assert_bit_equal(full_parameters(ours), before)
    assert scalers[0].get_scale() == 2.0


def test_a_scaler_steps_and_skips_as_one() -> None:
    run_ranks(check, 2)
