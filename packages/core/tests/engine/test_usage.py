"""A parameter that no rank uses in a backward gets no gradient, in whatever step that is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import full_gradients

STEPS = 6


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.a(x), self.b(x)


def train(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor]) -> list[Tensor]:
    """The weights after each step, with an optimizer that moves what gets zeros."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    weights = []
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        params = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
        weights.append(torch.cat([p.detach().flatten() for p in params]))
    return weights


def check(
    make: Callable[[], nn.Module],
    units: Callable[[nn.Module], Iterator[nn.Module]],
    loss_of: Callable[[nn.Module, int], Tensor],
) -> None:
    """All ranks compute the same here, so that the plain model of one process is the reference."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    for unit in units(model):
        fully_shard(unit)
    fully_shard(model)
    expected, found = train(plain, loss_of), train(model, loss_of)
    for step, (e, f) in enumerate(zip(expected, found, strict=True)):
        torch.testing.assert_close(f, e, msg=lambda text, step=step: f"step {step}: {text}")


def second_output_is_left_out_from_step_3_on(model: nn.Module, step: int) -> Tensor:
    a, b = model(torch.ones(2, 4))
    return a.sum() if step >= 3 else a.sum() + b.sum()


def no_units(_: nn.Module) -> Iterator[nn.Module]:
    yield from ()


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    yield from model.children()


@pytest.mark.parametrize("units", [no_units, layers_of])
@pytest.mark.parametrize("reduction", ["auto", "native"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_output_that_is_left_out_of_the_loss_later(
    units: Callable[..., Iterator[nn.Module]],
    reduction: str,
    world_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_REDUCE", reduction)
    run_ranks(check, world_size, TwoOutputs, units, second_output_is_left_out_from_step_3_on)


def three_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def one_unit_alone_in_odd_steps(model: nn.Module, step: int) -> Tensor:
    module = model[0] if step % 2 else model  # type: ignore[index]
    loss: Tensor = module(torch.ones(2, 4)).sum()
    return loss


def test_a_unit_that_is_run_alone_moves_alone() -> None:
    run_ranks(check, 2, three_layers, layers_of, one_unit_alone_in_odd_steps)


class Discriminators(nn.Module):
    """Heads in turn: each step another one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: Tensor, index: int) -> Tensor:
        score: Tensor = self.heads[index](x)
        return score


def heads_of(model: nn.Module) -> Iterator[nn.Module]:
    yield from model.heads  # type: ignore[misc]


def heads_in_turn(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(torch.ones(2, 4), step % 3).sum()
    return loss


def test_heads_in_turn() -> None:
    run_ranks(check, 2, Discriminators, heads_of, heads_in_turn)


def gradients_where_one_rank_leaves_out(mesh_shape: tuple[int, ...]) -> list[bool]:
    """Whether the second output's weight has a gradient, where 2, 1 and no rank use it."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("outer", "inner")[: len(mesh_shape)])
    model = fully_shard(TwoOutputs(), mesh=mesh)
    found = []
    last = dist.get_world_size() - 1
    for users in ([0, last], [last], []):
        a, b = model(torch.ones(2, 4))
        (a.sum() + b.sum() if dist.get_rank() in users else a.sum()).backward()
        found.append(full_gradients(model)["b.weight"] is not None)
        model.zero_grad()
    return found


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
def test_one_rank_that_uses_a_parameter_is_enough(mesh_shape: tuple[int, ...]) -> None:
    world_size = torch.Size(mesh_shape).numel()
    found = run_ranks(gradients_where_one_rank_leaves_out, world_size, mesh_shape)
    assert found == [[True, True, False]] * world_size


def no_sync_then_sync() -> list[bool]:
    """b is used in the micro-batch that is not synchronized only."""
    model = fully_shard(TwoOutputs())
    found = []
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        a, b = model(torch.ones(2, 4))
        (a.sum() + b.sum()).backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(2, 4))[0].sum().backward()
        found.append(full_gradients(model)["b.weight"] is not None)
        model.zero_grad()
    return found


def test_a_micro_batch_that_waits_counts() -> None:
    assert run_ranks(no_sync_then_sync, 2) == [[True, True]] * 2
