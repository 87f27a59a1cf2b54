"""Writes to ``p.data`` in the forward of any unit are kept."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.nn import functional as F

from vescale_fsdp import fully_shard, unsharded
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


class Inherits(Normalized):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Assigned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = F.normalize(self.weight.data)
        return super().forward(x)


def halve_bias(module: nn.Module, _: Any) -> None:
    module.bias.data.mul_(0.5)  # type: ignore[operator]


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
    hooked = nn.Linear(4, 4)
    hooked.register_forward_pre_hook(halve_bias)
    writers = [Normalized(4, 4), Inherits(4, 4), Assigned(4, 4), Property(4, 4), hooked]
    return nn.Sequential(Codebook(), *writers, Silent(4, 4), nn.Linear(4, 4))


def check(options: dict[str, Any], recomputes: bool = False) -> None:
    plain, model = make(), make()
    if recomputes:  # the forward, and its writes, come again in backward
        for part in (*plain, *model):
            recompute(part)
    for part in model:
        fully_shard(part, **options)
    fully_shard(model, **options)
    assert [may_write_data(unit_of(part)) for part in model] == [True] * 6 + [False] * 2  # type: ignore[arg-type]
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


class Decays(nn.Linear):
    """Writes in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def check_evaluation(options: dict[str, Any]) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Decays(4, 4), nn.Tanh(), Decays(4, 4))

    plain, model = make(), make()
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        x = torch.full((2, 4), 1.0 + step)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                each(x)
        compare(model, plain)  # as an average of weights reads them
        with torch.no_grad():
            for each in (plain, model):
                for param in each.parameters():
                    param.mul_(1.5)  # between passes
                each(x)
        compare(model, plain)


def compare(model: nn.Module, plain: nn.Module) -> None:
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.full_tensor(), plain.get_parameter(name).detach())  # type: ignore[attr-defined]


ROWS = [{}, {"reshard_after_forward": False}, *({"sharding": r} for r in ("zero1", "zero2", "ddp"))]


@pytest.mark.parametrize("options", ROWS)
def test_an_evaluation_may_write(options: dict[str, Any]) -> None:
    run_ranks(check_evaluation, 2, options)


def check_by_hand(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = fully_shard(copy.deepcopy(plain), **options)
    for each in (plain, model):
        with unsharded(each, writeback=True) if each is model else contextlib.nullcontext():
            for param in each[0].parameters():
                param.data = param.data * 0.5
            vector = nn.utils.parameters_to_vector(each[1].parameters())
            nn.utils.vector_to_parameters(vector.detach() + 1, each[1].parameters())
    compare(model, plain)
    refused = pytest.raises(RuntimeError, match=r"'1\.weight' was replaced by another one inside")
    with refused, unsharded(model, writeback=True):
        model[1].weight = nn.Parameter(torch.zeros(2, 4))
    compare(model, plain)
    refused = pytest.raises(RuntimeError, match=r"Linear got the parameters \['other'\]")
    with refused, unsharded(model, writeback=True):
        model[1].other = nn.Parameter(torch.zeros(2, 4))
    del model[1].other
    misfits = pytest.raises(ValueError, match=r"was given data of shape \(3,\)")
    with misfits, unsharded(model, writeback=True):
        model[1].bias.data = torch.zeros(3)


@pytest.mark.parametrize("options", ROWS)
def test_changes_by_hand_are_kept_or_refused(options: dict[str, Any]) -> None:
    run_ranks(check_by_hand, 2, options)
