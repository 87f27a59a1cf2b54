"""Writes to ``p.data`` in the forward of any unit are kept."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.nn import functional as F

from vescale_fsdp import fully_shard
from vescale_fsdp.engine.unit import unit_of
from vescale_fsdp.engine.writers import may_write_data
from vescale_fsdp.testing import run_ranks

from .helpers import full_parameters


def ema_in_place(average: Tensor, new: Tensor) -> None:
    average.data.mul_(0.9).add_(new, alpha=0.1)


class Codebook(nn.Module):
    """A codebook that follows its inputs, as of vector-quantized autoencoders."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(6, 4), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.follow(x)
        return x * self.scale + self.code.mean(0)

    def follow(self, x: Tensor) -> None:
        ema_in_place(self.code, x.detach().mean(0).expand(6, 4))


class Normalized(nn.Linear):
    """Weights of length one, as of face recognition."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.copy_(F.normalize(self.weight.data))
        return super().forward(x)


class Silent(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def _init_weights(self) -> None:
        self.weight.data.normal_()


class Property(nn.Linear):
    @property
    def halved(self) -> Tensor:
        self.weight.data.mul_(0.5)
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.halved)


class Wrapped(nn.Linear):
    @staticmethod
    def noisy(function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            return function(*args)

        return run

    @noisy
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *[each.data for each in (self.weight, self.bias)])


def make() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [Codebook(), Normalized(4, 4), Property(4, 4), Silent(4, 4), nn.Linear(4, 4)]
    return nn.Sequential(*parts)


def check(options: dict[str, Any], recomputes: bool = False) -> None:
    plain, model = make(), make()
    if recomputes:  # the forward, and its writes, come again in backward
        for part in (*plain, *model):
            recompute(part)
    for part in model:
        fully_shard(part, **options)
    fully_shard(model, **options)
    assert [may_write_data(unit_of(part)) for part in model] == [True, True, True, False, False]  # type: ignore[arg-type]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        x = torch.full((2, 4), 1.0 + step)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), msg=name)


@pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": False}, {"sharding": "zero1"}, {"sharding": "ddp"}]
)
def test_they_are_kept(options: dict[str, Any]) -> None:
    run_ranks(check, 2, options)


class Odd:
    """An object of the module that calls and attributes of any name go through to."""

    def __getattr__(self, name: str) -> Odd:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


odd = Odd()


class CallsOdd(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(odd(x))


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_they_are_kept_where_forwards_are_recomputed(options: dict[str, Any]) -> None:
    run_ranks(check, 2, options, True)


def check_wrapped() -> None:
    calls_odd = fully_shard(CallsOdd(4, 4))
    assert not may_write_data(unit_of(calls_odd))  # type: ignore[arg-type]
    wrapped = fully_shard(Wrapped(4, 4))
    assert may_write_data(unit_of(wrapped))  # type: ignore[arg-type]
    replaced: Any = nn.Linear(4, 4)
    replaced.forward = lambda x: F.linear(x, replaced.weight.data)
    fully_shard(replaced)
    assert may_write_data(unit_of(replaced))  # type: ignore[arg-type]


def test_decorated_and_replaced_forwards_are_read() -> None:
    run_ranks(check_wrapped, 1)
