"""Meshes of all kinds: units on different ones, and ranks in any order."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vescale_fsdp import RankMismatchError, clip_grad_norm_, fully_shard
from vescale_fsdp.engine import axes
from vescale_fsdp.testing import run_ranks

from .helpers import full_gradients, full_parameters
from .models import MLP, inputs_of, make

WORLD_SIZE = 4


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """All ranks, and the two ranks that share the caller's experts."""
    whole = init_device_mesh("cpu", (WORLD_SIZE,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
    return whole, grid["data"]


def averaged(gradient: torch.Tensor, ranks: list[int]) -> torch.Tensor:
    everyone = [torch.empty_like(gradient) for _ in range(WORLD_SIZE)]
    dist.all_gather(everyone, gradient)
    return torch.stack([everyone[rank] for rank in ranks]).mean(0)


def expected_gradients(plain: nn.Module, data_ranks: list[int]) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in plain.named_parameters():
        ranks = data_ranks if name.startswith("layers.1") else list(range(WORLD_SIZE))
        found[name] = averaged(parameter.grad, ranks)
    return found


def check_gradients() -> None:
    rank = dist.get_rank()
    whole, data = meshes()
    data_ranks = [0, 1] if rank < 2 else [2, 3]
    plain, model = make(MLP), make(MLP)
    fully_shard(model.layers[0], mesh=whole)
    fully_shard(model.layers[1], mesh=data)  # each pair of ranks has an expert of its own
    fully_shard(model, mesh=whole)
    for step in range(3):
        plain.zero_grad()
        model.zero_grad()
        plain(inputs_of(step, rank)).sum().backward()
        model(inputs_of(step, rank)).sum().backward()
        expected = expected_gradients(plain, data_ranks)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    total = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
    torch.testing.assert_close(clip_grad_norm_(model, 1e9), total, rtol=1e-5, atol=0)


def test_each_unit_averages_over_the_ranks_of_its_own_mesh() -> None:
    run_ranks(check_gradients, WORLD_SIZE)


def check_order(ranks: list[Any], names: tuple[str, ...]) -> None:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    rank = dist.get_rank()
    plain, model = make(MLP), make(MLP)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each in (plain, model):
            each(inputs_of(step, rank)).square().sum().backward()
        for parameter in plain.parameters():
            parameter.grad = averaged(parameter.grad, list(range(WORLD_SIZE)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in full_parameters(model).items():
            wanted = plain.get_parameter(name)
            torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ([2, 0, 3, 1], ("shard",)),
        ([[3, 0], [1, 2]], ("replicate", "shard")),
        ([[2, 3], [0, 1]], ("replicate", "shard")),
    ],
)
def test_ranks_of_a_mesh_may_be_in_any_order(ranks: list[Any], names: tuple[str, ...]) -> None:
    run_ranks(check_order, WORLD_SIZE, ranks, names)


def check_parts_on_two_meshes() -> None:
    """What forward keeps for backward is a part of 2: the expert's mesh of 2 cannot be divided."""
    whole, data = meshes()
    info = FSDPMeshInfo(data, shard_mesh_dim=0)
    plain, model = make(MLP, 2), make(MLP, 2)

    def choose(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(None, info) if parameter.dim() == 1 else None

    fully_shard(model, mesh=whole, reshard_after_forward=2, shard_placement_fn=choose)
    rank = dist.get_rank()
    plain(inputs_of(0, rank)).sum().backward()
    model(inputs_of(0, rank)).sum().backward()
    weight = averaged(plain.layers[0].weight.grad, [0, 1, 2, 3])
    got = model.layers[0].weight.grad.full_tensor()
    torch.testing.assert_close(got, weight, rtol=1e-5, atol=1e-6)


def another_mesh_on_one_rank() -> None:
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = fully_shard(nn.Linear(8, 8), mesh=square if dist.get_rank() == 3 else flat)
    expected = r"rank 0 has a mesh of ranks \[0, 1, 2, 3\].* rank 3 has .*\[\[0, 1\], \[2, 3\]\]"
    with pytest.raises(RankMismatchError, match=expected):
        model(torch.ones(2, 8))


def test_ranks_with_another_mesh_are_told_so() -> None:
    run_ranks(another_mesh_on_one_rank, 4, timeout_s=20)


def test_an_int_reshard_holds_where_it_divides_the_mesh() -> None:
    run_ranks(check_parts_on_two_meshes, WORLD_SIZE)


_groups: list[weakref.ref[dist.ProcessGroup]] = []  # of the last call, on this rank


def make_communicators() -> None:
    model = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    mesh = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.ones(2), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    comm = axes.comm_for(axes.Axes.of(mesh))
    _groups[:] = [weakref.ref(group) for group in (comm.gather_group, comm.reduce_group)]


def communicators_that_stay() -> int:
    return sum(group() is not None for group in _groups)


def test_communicators_end_with_torch_distributed() -> None:
    """Each has threads; those of gloo wake a hundred times a second."""
    run_ranks(make_communicators, 2)
    assert run_ranks(communicators_that_stay, 2) == [0, 0]
