"""Tensor parallelism first (``parallelize_module``), then ``fully_shard``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from vescale_fsdp import Granularity, RaggedShard, clip_grad_norm_, fully_shard
from vescale_fsdp.testing import run_ranks

from .models import make

WIDTH = 8


class Pair(nn.Module):
    """Two linear layers, cut by columns and by rows, and a norm that every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList([Pair() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = pair(x)
        return x


def parallelized(mesh: DeviceMesh) -> Stack:
    model = make(Stack)
    for pair in model.pairs:
        parallelize_module(pair, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def batch(step: int, data_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return torch.randn(3, WIDTH, generator=generator)


def check_against_fsdp2(names: tuple[str, ...], sizes: tuple[int, ...], num_steps: int) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    data = mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
    data_rank = dist.get_rank() // sizes[-1]
    models = [parallelized(mesh["tensor"]), parallelized(mesh["tensor"])]
    for model, shard in zip(models, (fully_shard, torch_fully_shard), strict=True):
        for pair in model.pairs:
            shard(pair, mesh=data)
        shard(model, mesh=data)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(num_steps):
        losses, norms = [], []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(batch(step, data_rank)).square().mean()
            loss.backward()
            if step % 2:
                norms.append(_clip(model, 0.1))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)
        if norms:
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=1e-6)
    expected = dict(models[1].named_parameters())
    for name, parameter in models[0].named_parameters():
        ours, theirs = parameter.full_tensor(), expected[name].full_tensor()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=name)


def _clip(model: nn.Module, limit: float) -> Tensor:
    """By our function for ours; by hand for FSDP2, whose norm cannot mix meshes."""
    gradients = [parameter.grad for parameter in model.parameters()]
    if any(isinstance(p, RaggedShard) for g in gradients for p in g.placements):
        return clip_grad_norm_(model, limit)
    total = torch.stack([gradient.full_tensor().norm() for gradient in gradients]).norm()
    scale = torch.clamp(limit / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.to_local().mul_(scale)
    return total


@pytest.mark.parametrize(
    ("names", "sizes"),
    [(("data", "tensor"), (2, 2)), (("data", "tensor"), (1, 4)), (("data", "tensor"), (4, 1))],
)
@pytest.mark.sampled(2)
def test_training_equals_fsdp2_after_tensor_parallelism(
    names: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    run_ranks(check_against_fsdp2, 4, names, sizes, 6)


def test_hybrid_sharding_after_tensor_parallelism() -> None:
    run_ranks(check_against_fsdp2, 4, ("replicate", "data", "tensor"), (2, 1, 2), 4)


def check_placements() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelized(mesh["tensor"])
    whole = {name: _whole(p) for name, p in model.named_parameters()}
    for pair in model.pairs:
        fully_shard(pair, mesh=mesh["data"], granularity=Granularity.rows(1))
    fully_shard(model, mesh=mesh["data"])
    pair = model.pairs[0]
    up, down, norm = pair.up.weight, pair.down.weight, pair.norm.weight
    assert up.shape == (4 * WIDTH, WIDTH)
    assert up.placements[1] == Shard(0)
    assert up.placements[0].split_factor == (2 if up.placements[0].dims else 1)
    assert down.placements[1] == Shard(1)
    assert isinstance(norm.placements[0], RaggedShard)
    assert len(norm.placements) == 1
    assert pair.down.bias.placements[1] == Replicate()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[name]), name
    seen = []
    pair.up.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    model(batch(0, 0))
    assert type(seen[0].data) is DTensor
    assert seen[0].placements == (Shard(0),)


def _whole(parameter: Tensor) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().clone()


def test_parameters_are_one_dtensor_over_all_axes_at_rest() -> None:
    run_ranks(check_placements, 4)


def check_errors() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Linear(4, 5)
    parallelize_module(model, mesh["tensor"], ColwiseParallel())
    with pytest.raises(
        NotImplementedError, match=r"'weight' of shape \(5, 4\) is unevenly sharded"
    ):
        fully_shard(model, mesh=mesh["data"])


def test_uneven_tensor_parallelism_is_refused_by_name() -> None:
    run_ranks(check_errors, 4)


def on_whole_mesh(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    """All parameters as DTensors on all axes: the weights of ``up`` and ``down`` are cut."""
    cuts = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    tensor = mesh.mesh_dim_names.index("tensor")
    for name, parameter in list(model.named_parameters()):
        placements = [Replicate()] * mesh.ndim
        placements[tensor] = cuts.get(name, Replicate())
        owner, _, attribute = name.rpartition(".")
        whole = distribute_tensor(parameter.data, mesh, placements)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(whole))
    return model


def check_named_axes(
    names: tuple[str, ...], sizes: tuple[int, ...], dims: Any, of_each: bool = False
) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    whole = {name: p.detach().clone() for name, p in make(Pair).named_parameters()}
    models = [on_whole_mesh(mesh, make(Pair)) for _ in range(2)]
    for model, shard in zip(models, (fully_shard, torch_fully_shard), strict=True):
        options: dict[str, Any] = {"mesh": mesh, "dp_mesh_dims": dims}
        if of_each:  # as torchtitan does for experts
            info = FSDPMeshInfo(mesh["data"], shard_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
            placed = ShardPlacementResult(Shard(0), info)
            options["shard_placement_fn"] = lambda _, placed=placed: placed
        shard(model, **options)
    for name, parameter in models[0].named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[name]), name
    placements = [Replicate()] * mesh.ndim
    placements[names.index("data")] = Shard(0)
    for step in range(2):
        batch_of_all = torch.cat([batch(step, rank) for rank in range(2)])
        for model in models:
            model.zero_grad()
            model(distribute_tensor(batch_of_all, mesh, placements)).square().mean().backward()
        expected = dict(models[1].named_parameters())
        for name, parameter in models[0].named_parameters():
            ours, theirs = parameter.grad.full_tensor(), expected[name].grad.full_tensor()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("names", "sizes", "dims"),
    [
        (("data", "tensor"), (2, 2), DataParallelMeshDims(shard="data")),
        (("data", "tensor"), (2, 2), DataParallelMeshDims(replicate="data")),  # DDP
        (("data", "pod", "tensor"), (2, 1, 2), DataParallelMeshDims(shard=("data", "pod"))),
        (
            ("pod", "data", "tensor"),
            (1, 2, 2),
            DataParallelMeshDims(shard="data", replicate="pod"),
        ),
    ],
)
@pytest.mark.sampled(1)
def test_axes_of_a_whole_mesh_by_name(
    names: tuple[str, ...], sizes: tuple[int, ...], dims: Any
) -> None:
    run_ranks(check_named_axes, 4, names, sizes, dims)


def test_axes_by_name_for_each_parameter() -> None:
    dims = DataParallelMeshDims(shard="data")
    run_ranks(check_named_axes, 4, ("data", "tensor"), (2, 2), dims, True)


def check_named_axes_errors() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dims = DataParallelMeshDims(shard="data")
    with pytest.raises(ValueError, match=r"Got plain tensor for parameter 'norm\.weight'"):
        fully_shard(Pair(), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="Mesh dim name 'dp' not found"):
        fully_shard(Pair(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    with pytest.raises(ValueError, match="mesh must have mesh_dim_names"):
        fully_shard(Pair(), mesh=init_device_mesh("cpu", (4,)), dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="dp_mesh_dims must be a torch"):
        fully_shard(Pair(), mesh=mesh, dp_mesh_dims="data")
    model = on_whole_mesh(mesh, Pair())
    sharded = distribute_tensor(torch.zeros(WIDTH), mesh, [Shard(0), Replicate()])
    model.norm.weight = nn.Parameter(sharded)
    with pytest.raises(ValueError, match=r"Expected Replicate\(\) on DP dim 'data' but got"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


def test_wrong_named_axes_are_refused() -> None:
    run_ranks(check_named_axes_errors, 4)
