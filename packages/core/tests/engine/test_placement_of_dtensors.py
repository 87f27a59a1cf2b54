"""``Shard(d)`` by ``shard_placement_fn`` for parameters that are DTensors already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from vescale_fsdp import checkpoint, fully_shard
from vescale_fsdp.testing import run_ranks

WIDTH = 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def made() -> MLP:
    torch.manual_seed(0)
    return MLP()


def batch(step: int, data_rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + data_rank))


def expected() -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Gradients of each step, and the weights after them, of one process."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    gradients = []
    for step in range(3):
        for data_rank in range(2):
            (model(batch(step, data_rank)).square().sum() / 2).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {name: p.detach() for name, p in model.named_parameters()}


def sharded(dims: int) -> tuple[Any, int]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = made()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(
        model,
        mesh=mesh["dp"],
        shard_placement_fn=lambda p: Shard(dims) if p.dim() > 1 else Shard(0),
    )
    return model, mesh["dp"].get_local_rank()


def check_uneven() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    modules = [nn.Linear(7, 6, bias=False) for _ in range(2)]
    for module in modules:
        cut = distribute_tensor(weight, mesh["tp"], [Shard(1)], src_data_rank=None)
        module.weight = nn.Parameter(cut)
    with pytest.raises(
        NotImplementedError, match=r"dimension 1 of 'weight', of shape \(6, 7\), is unevenly"
    ):
        fully_shard(modules[0], mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
    fully_shard(modules[1], mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(0))
    assert torch.equal(modules[1].weight.full_tensor(), weight)
    other = nn.Linear(7, 6, bias=False)  # torch.chunk gives the first rank 4 of 7 columns
    part = weight.split([3, 4], 1)[mesh["tp"].get_local_rank()].contiguous()
    cut = DTensor.from_local(part, mesh["tp"], [Shard(1)], shape=weight.shape, stride=(7, 1))
    other.weight = nn.Parameter(cut)
    with pytest.raises(ValueError, match=r"this rank should have a part of shape \(6, [34]\), but"):
        fully_shard(other, mesh=mesh["dp"])


def test_a_dimension_that_is_unevenly_sharded_is_not_sharded_again() -> None:
    run_ranks(check_uneven, 4)


def check_training(dims: int, folder: str) -> None:
    gradients, weights = expected()
    model, data_rank = sharded(dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        model(batch(step, data_rank)).square().sum().backward()
        for name, param in model.named_parameters():
            found = param.grad.full_tensor()
            torch.testing.assert_close(found, gradients[step][name], rtol=1e-4, atol=1e-5, msg=name)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(folder, model, optimizer)
    other, _ = sharded(1 - dims)  # cut in another way
    checkpoint.load(folder, other, torch.optim.AdamW(other.parameters(), lr=0.01))
    for each in (model, other):
        for name, param in each.named_parameters():
            found = param.detach().full_tensor()
            torch.testing.assert_close(found, weights[name], rtol=1e-4, atol=1e-5, msg=name)
    cut = [p.placements[0] for p in model.parameters() if p.dim() > 1]
    if dims:
        assert [placement.dim for placement in cut] == [1, 1]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dims", [0, 1])
def test_tensor_parallel_layers(dims: int, num_ranks: int, tmp_path: Path) -> None:
    run_ranks(check_training, num_ranks, dims, str(tmp_path / "saved"))


class Experts(nn.Module):
    """Fewer experts than ranks, so that torchtitan shards them along dimension 1."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(distribute_tensor(torch.randn(1, WIDTH, WIDTH), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.w, DTensor)
        return x @ self.w.to_local()[0]


def check_experts() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("efsdp", "ep"))
    model = Experts(mesh["ep"])
    whole: Tensor = model.w.detach().full_tensor()  # type: ignore[attr-defined]
    fully_shard(model, mesh=mesh["efsdp"], shard_placement_fn=lambda p: Shard(1))
    assert model.w.placements == (Shard(1), Shard(0))  # type: ignore[attr-defined]
    assert model.w.to_local().shape == (1, WIDTH // 2, WIDTH)  # type: ignore[operator]
    x = batch(0, dist.get_rank())
    assert torch.equal(model(x), x @ whole[0])
    model(x).sum().backward()
    gradient = sum(batch(0, rank).T @ torch.ones(3, WIDTH) for rank in range(2)) / 2
    torch.testing.assert_close(model.w.grad.full_tensor()[0], gradient)  # type: ignore[union-attr,operator]


def test_experts_along_another_dimension() -> None:
    run_ranks(check_experts, 2)
