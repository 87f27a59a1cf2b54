"""BatchNorm under mixed precision: parameters have the dtype of its statistics, as in autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vescale_fsdp import Budget, MixedPrecisionPolicy, fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import full_parameters

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 5, 3), nn.InstanceNorm2d(5, affine=True), nn.Flatten()),
        nn.LazyLinear(6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 2),
    )  # fmt: skip


def images(step: int) -> torch.Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, *, autocast: bool = False) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(images(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def with_units(kind: str) -> dict[str, Any]:
    model = make()
    model(images(0))  # for the lazy layer
    model[1].reset_running_stats()
    plain = train(DistributedDataParallel(model), autocast=True).module
    model = make()
    model(images(0))
    model[1].reset_running_stats()
    if kind == "norms":
        fully_shard(model[1], mp_policy=BF16)
        fully_shard(model[3][1], mp_policy=BF16)
    if kind != "root":
        fully_shard(model[3], mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    seen = []
    model[1].register_forward_pre_hook(lambda m, _: seen.append((m.weight.dtype, m.bias.dtype)))
    model[5].register_forward_pre_hook(lambda m, _: seen.append((m.weight.dtype, m.bias.dtype)))
    train(model)
    assert {*seen[::2]} == {(torch.float32,) * 2}, "it has statistics"
    assert {*seen[1::2]} == {(torch.bfloat16,) * 2}, "it has none"
    model.eval()
    assert model(images(9)).dtype == torch.bfloat16
    return {
        "ours": full_parameters(model),
        "plain": {name: each.detach() for name, each in plain.named_parameters()},
        "mean": (model[1].running_mean, plain[1].running_mean),
    }


@pytest.mark.parametrize("kind", ["root", "blocks", "norms"])
def test_norms_with_statistics_train_in_16_bits(kind: str) -> None:
    found = run_ranks(with_units, 2, kind)[0]
    for name, expected in found["plain"].items():
        torch.testing.assert_close(found["ours"][name], expected, rtol=0.1, atol=0.02, msg=name)
    torch.testing.assert_close(*found["mean"], rtol=0.05, atol=0.02)


def within_a_budget() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    fully_shard(model, mp_policy=BF16, budget=Budget(memory="1GiB", inputs=torch.randn(4, 4)))
    model(torch.randn(4, 4)).float().sum().backward()


def test_a_budget_tries_them_as_they_train() -> None:
    run_ranks(within_a_budget, 2)
