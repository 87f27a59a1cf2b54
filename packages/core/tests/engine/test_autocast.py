"""``torch.autocast`` around several forwards: its cache has casts of unsharded parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks


class Block(nn.Sequential):
    recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.recomputes:
            return super().forward(x)  # type: ignore[no-any-return]
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def make(*, shards: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    if shards:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    return model


def loss_of(model: nn.Module, seed: int, *, shards: bool) -> Tensor:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
    x = x.chunk(dist.get_world_size())[dist.get_rank()] if shards else x
    x.requires_grad_()  # then the first block, too, is freed before the backward has ended
    return model(x).float().square().mean()


def accumulates(model: nn.Module, *, shards: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=shards):
        for seed in range(3):
            loss_of(model, seed, shards=shards).backward()


def recomputes(model: nn.Module, *, shards: bool) -> None:
    """The recomputation of the first block is the last use of the cache before the next forward."""
    for block in model.children():
        block.recomputes = True  # type: ignore[assignment]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=shards):
        for seed in range(3):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=shards):
                loss = loss_of(model, seed, shards=shards)
            loss.backward()


def evaluates_before(model: nn.Module, *, shards: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=shards):
        with torch.no_grad():
            loss_of(model, 0, shards=shards)
        loss = loss_of(model, 1, shards=shards)
    loss.backward()


def steps(model: nn.Module, *, shards: bool) -> None:
    """Torch's cache still has the casts of before the step, so the single process has none."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=shards):
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed, shards=shards).backward()
            optimizer.step()


def compared(run: Callable[..., None]) -> None:
    models = [make(shards=shards) for shards in (False, True)]
    for model, shards in zip(models, (False, True), strict=True):
        run(model, shards=shards)
    for plain, sharded in zip(*(model.parameters() for model in models), strict=True):
        assert isinstance(sharded.grad, DTensor)
        torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, rtol=0.03, atol=1e-3)


@pytest.mark.parametrize("run", [accumulates, recomputes, evaluates_before, steps])
def test_several_forwards_in_one_context(run: Callable[..., None]) -> None:
    run_ranks(compared, 2, run)
