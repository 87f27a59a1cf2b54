"""Fabric's methods other than forward, and ``zero_grad`` of its wrapper, beside DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp.testing import run_ranks

from .test_fabric import make_fabric

WORLD_SIZE = 2


class Lit(lightning.LightningModule):
    """Layers that are units, BatchNorm, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(4))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(self.norm(x) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self.body(x).square().mean()

    def validation_step(self, x: Tensor, index: int) -> Tensor:
        return self(x).square().mean()

    def distance(self, x: Tensor) -> Tensor:
        return self.body(x).abs().mean()


def trains_by_methods(strategy: str) -> list[float]:
    fabric = make_fabric(strategy)
    module = Lit()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    model.mark_forward_method("distance")
    values = []
    for step in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for method in (lambda x: model.training_step(x, 0), lambda x: model.distance(x)):
            loss = method(x)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        model.eval()
        with torch.no_grad():
            values.append(model.validation_step(torch.ones(2, 4), 0).item())
        model.train()
    return values


def clears_in_between(strategy: str) -> list[float]:
    """A GAN calls ``zero_grad`` of its models between forward and backward."""
    fabric = make_fabric(strategy)
    module = Lit()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    values = []
    for step in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step + dist.get_rank()))
        loss = model(x).square().mean()
        model.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        values.append(loss.item())
    return values


@pytest.mark.parametrize("train", [trains_by_methods, clears_in_between])
def test_as_with_ddp(train: Callable[[str], list[float]]) -> None:
    expected: Any = run_ranks(train, WORLD_SIZE, "ddp")
    for found, wanted in zip(run_ranks(train, WORLD_SIZE, "vescale_fsdp"), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)
