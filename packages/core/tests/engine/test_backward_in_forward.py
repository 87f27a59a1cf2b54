"""Backwards inside of a forward: forces, guidance, local losses, and manual optimization.

The unit around stays unsharded, because its own parameters may be used afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import fully_shard, register_fsdp_forward_method
from vescale_fsdp.testing import run_ranks

WIDTH, BATCH, STEPS = 6, 8, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "reshard_after_forward": {"reshard_after_forward": True},
    "in_flight": {"in_flight": 1},
    **{row: {"sharding": row} for row in ("ddp", "zero1", "zero2")},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.tanh(self.norm(x)))


class Base(nn.Module):
    """Two blocks, and parameters of its own before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Forces(Base):
    """The gradient of an energy goes through a layer."""

    def forward(self, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        energy = self.through(self.first(place)).square().sum()
        (force,) = torch.autograd.grad(energy, place)
        return self.last(force)


class Guided(Base):
    """A step along the gradient, which no weight gets a gradient of."""

    def forward(self, x: Tensor) -> Tensor:
        place = self.first(x).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.through(place).square().sum(), place)
        return self.last(self.through(self.first(x) - 0.1 * slope))


class LocalLosses(Base):
    """Each block has a loss of its own, and no gradient goes further."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.square().mean().backward(retain_graph=True)
        for block in self.blocks:
            x = block(x.detach())
            x.square().mean().backward()
        return self.last(x.detach())


class OwnLoss(Base):
    """The loss of a layer of its own, which runs again."""

    def forward(self, x: Tensor) -> Tensor:
        self.last(x.detach()).square().mean().backward()
        return self.last(self.through(self.first(x)))


class Codebook(Base):
    """Writes to a parameter before and after a backward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.bias.mul_(0.9)
        self.last(x.detach()).square().mean().backward()
        with torch.no_grad():
            self.last.weight.mul_(0.9)
        return self.last(self.through(self.first(x)))


def train(model: nn.Module, x: Callable[[int], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for step in range(STEPS):
        model(x(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Manual(nn.Module):
    """Two optimizers, of which each steps within ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Block(), Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x)) * self.scale  # type: ignore[no-any-return]

    def step_of(self, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()
        self.zero_grad()

    def training_step(self, x: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> Tensor:
        first, second = optimizers
        self(x).square().mean().backward()
        with torch.no_grad():
            self.generator(x)  # something to log: a forward between the backward and the clipping
        self.step_of(first)
        critic = self.critic(self.generator(x)) * self.scale
        (critic - 1).square().mean().backward()
        self.step_of(second)
        with torch.no_grad():
            return (self.critic(x) * self.scale).mean()


class Following(Manual):
    """A copy follows the parameters, by its own parameters, after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = Block().requires_grad_(False)

    def training_step(self, x: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> Tensor:
        super().training_step(x, optimizers)
        self(x).square().mean().backward()
        self.step_of(optimizers[0])
        for mine, theirs in zip(self.copy.parameters(), self.generator.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.5)
        return x.mean()


class Toggled(Manual):
    """Parameters are frozen while others train, as by ``toggle_optimizer`` of Lightning."""

    def training_step(self, x: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> Tensor:
        with torch.no_grad():
            self.scale.div_(self.scale.norm())
        for _ in range(2):
            for mine, others in (optimizers, optimizers[::-1]):
                frozen = [param for group in others.param_groups for param in group["params"]]
                for param in frozen:
                    param.requires_grad_(False)
                critic = self.critic(self.generator(x)) * self.scale
                (critic - 1).square().mean().backward()
                mine.step()
                mine.zero_grad()
                assert all(param.grad is None for param in frozen)
                for param in frozen:
                    param.requires_grad_(True)
        return x.mean()


def train_by_hand(model: Manual, x: Callable[[int], Tensor]) -> None:
    first = torch.optim.SGD([*model.generator.parameters(), model.scale], 0.5, momentum=0.9)
    second = torch.optim.AdamW(model.critic.parameters(), 0.05, foreach=True)
    for step in range(STEPS):
        model.training_step(x(step), (first, second))


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)


def part_of(step: int) -> Tensor:
    return batch(step).chunk(dist.get_world_size())[dist.get_rank()]


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def check(
    kind: type[nn.Module], run: Callable[..., None], options: dict[str, Any], *, units: bool
) -> None:
    plain, sharded = make(kind), make(kind)
    for block in [each for each in sharded.modules() if isinstance(each, Block) and units]:
        fully_shard(block, **options)
    fully_shard(sharded, **options)
    if issubclass(kind, Manual):
        register_fsdp_forward_method(sharded, "training_step")
    run(plain, batch)
    run(sharded, part_of)
    for name, param in sharded.named_parameters():
        torch.testing.assert_close(
            param.full_tensor(),  # type: ignore[attr-defined]
            plain.get_parameter(name),
            rtol=1e-11,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


CASES = [
    *(partial(check, kind, train) for kind in (Forces, Guided, LocalLosses, OwnLoss, Codebook)),
    *(partial(check, kind, train_by_hand) for kind in (Manual, Following, Toggled)),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("units", [True, False], ids=["units", "root only"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_is_that_of_one_process(options: dict[str, Any], units: bool) -> None:
    run_ranks(check_all, 2, options, units)


def check_all(options: dict[str, Any], units: bool) -> None:
    for case in CASES:
        case(options, units=units)


def test_so_it_is_with_replicas() -> None:
    run_ranks(check_with_replicas, 4)


def check_with_replicas() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    check_all({"mesh": mesh}, units=True)
