"""Units of one model on different meshes: experts over fewer ranks than the rest."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_fsdp import clip_grad_norm_, fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import full_gradients
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
