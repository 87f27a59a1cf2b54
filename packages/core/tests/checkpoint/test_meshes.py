"""Checkpoints between meshes: plain and hybrid sharding, tensor parallelism, even shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from vescale_fsdp import checkpoint, fully_shard
from vescale_fsdp.testing import run_ranks

State = dict[str, Tensor]


class Pair(nn.Module):
    """Tensor parallelism over two ranks has 4 and 3 of the hidden width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def flat(model: Pair) -> None:
    fully_shard(model)


def hybrid(model: Pair) -> None:
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: Pair) -> None:
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (half, 2), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])


def even(model: Pair) -> None:
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)


Layout = Callable[[Pair], None]
LAYOUTS: list[Layout] = [flat, hybrid, tensor_parallel, even]


def make(shard: Layout, seed: int) -> tuple[Pair, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Pair()
    shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def step(model: Pair, optimizer: torch.optim.AdamW, number: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model: Pair, optimizer: torch.optim.AdamW) -> State:
    state: State = {}
    for name, parameter in model.named_parameters():
        state[name] = parameter.full_tensor().detach()
        for key, value in optimizer.state[parameter].items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[f"{name}/{key}"] = whole.detach().clone()
    return state


def save(path: Path, shard: Layout) -> State:
    model, optimizer = make(shard, seed=1)
    for number in range(2):
        step(model, optimizer, number)
    checkpoint.save(path, model, optimizer)
    return everything(model, optimizer)


def load(path: Path, shard: Layout) -> State:
    model, optimizer = make(shard, seed=2)
    step(model, optimizer, 7)
    checkpoint.load(path, model, optimizer)
    return everything(model, optimizer)


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.sampled(2)
def test_any_layout_loads_what_any_other_has_saved(saved: Layout, tmp_path: Path) -> None:
    before = run_ranks(save, 4, tmp_path / "step", saved)[0]
    worlds = [(flat, 1), (flat, 3), (hybrid, 4), (tensor_parallel, 2), (tensor_parallel, 4)]
    for loaded, world_size in [*worlds, (even, 2)]:
        after = run_ranks(load, world_size, tmp_path / "step", loaded)[0]
        assert after.keys() == before.keys()
        for name, value in before.items():
            assert torch.equal(after[name], value), (loaded.__name__, name)
