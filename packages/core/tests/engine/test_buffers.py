"""``broadcast_buffers``: buffers are the first rank's before a forward, as with DDP."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from vescale_fsdp import RankMismatchError, fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import shard_units


class Normed(nn.Module):
    """BatchNorm with its three buffers, an odd one before them, and one of bools."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        for layer in self.layers:
            x = layer(x)
        return x


def make_model() -> Normed:
    torch.manual_seed(0)
    return Normed()


def run(model: nn.Module, plain: nn.Module, sync: object) -> list[Tensor]:
    """Two steps of two micro-batches, with an evaluation between them; what is seen on the way."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(2):
        for micro in range(2):
            sync(micro == 1)  # type: ignore[operator]
            loss = model(torch.randn(6, 4, generator=generator)).square().sum()
            loss.backward()
            found += [loss.detach(), *map(torch.clone, plain.buffers())]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found += [model(torch.ones(1, 4)) for _ in range(2)]
        found += map(torch.clone, plain.buffers())
        model.train()
    return found


def beside_ddp() -> None:
    replicated = make_model()
    ddp = DistributedDataParallel(replicated)

    def sync_of_ddp(enabled: bool) -> None:
        ddp.require_backward_grad_sync = enabled

    expected = run(ddp, replicated, sync_of_ddp)
    for on in (True, False):
        model = make_model()
        shard_units(model, model.layers, broadcast_buffers=on)
        model = copy.deepcopy(model)  # what it was told goes along
        found = run(model, model, model.set_requires_gradient_sync)
        assert len(found) == len(expected)
        equal = [torch.equal(*pair) for pair in zip(found, expected, strict=True)]
        assert all(equal) == (on or dist.get_rank() == 0)


def replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    fully_shard(model, mesh=mesh, broadcast_buffers=True)
    model.layers[0][1].running_mean.fill_(dist.get_rank() + 7)
    model.eval()
    model(torch.ones(1, 4))
    assert model.layers[0][1].running_mean.tolist() == [7] * 4


def saved_for_backward() -> None:
    """The writes between a forward and its backward are hidden from autograd, as with DDP."""
    model = make_model()
    model.layers[0][1].eval()  # autograd keeps its running statistics
    fully_shard(model, broadcast_buffers=True)
    x = torch.ones(2, 4, requires_grad=True)
    (model(x).sum() + model(x).sum()).backward()


def mistakes() -> None:
    with pytest.raises(ValueError, match="broadcast_buffers must be True or False, got 1"):
        fully_shard(make_model(), broadcast_buffers=1)  # type: ignore[arg-type]
    model = make_model()
    model.register_buffer("odd", torch.zeros(1 + dist.get_rank()))
    fully_shard(model, broadcast_buffers=True)
    with pytest.raises(RankMismatchError, match=r"buffer 'odd' \(shape \(1,\)"):
        model(torch.ones(2, 4))


def on_two_ranks() -> None:
    beside_ddp()
    saved_for_backward()
    mistakes()


def test_buffers_are_those_of_ddp_if_asked_for_and_each_ranks_own_if_not() -> None:
    run_ranks(on_two_ranks, 2)


def test_replicas_get_the_buffers_of_the_first_rank() -> None:
    run_ranks(replicas, 4)
