"""Modules that are added to a sharded model: found, sharded, and trained as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import clip_grad_norm_, fully_shard, late_modules
from vescale_fsdp.testing import run_ranks


class Adapted(nn.Module):
    """A layer and adapters, which may be added later."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down, self.up = nn.ModuleDict(), nn.ModuleDict()

    def add(self, name: str, width: int) -> None:
        self.down[name] = nn.Linear(width, 2, bias=False)
        self.up[name] = nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for name in self.down:
            y = y + self.up[name](self.down[name](x))
        return y.tanh()


class Model(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(width) for _ in range(3))
        self.head: nn.Module = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:  # [batch, width] -> [batch, 3 or 5]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def add(model: Model, stage: int) -> None:
    torch.manual_seed(stage)
    if stage == 1:
        model.head = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5))
    else:
        for block in model.blocks:
            block.add(f"adapter{stage}", 6)  # type: ignore[operator]
        for block in model.blocks[:2]:
            block.base.requires_grad_(False)


def train(model: Any, rank: int, num_ranks: int, stage: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(4):
        random = torch.Generator().manual_seed(10 * stage + step)
        batches = torch.randn(2, 4, 6, generator=random).chunk(num_ranks, 1)
        for number, batch in enumerate(batches[rank]):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(number == 1)
            model(batch).square().mean().backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        norms.append(float(norm.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in model.state_dict().items()
    }


def check_training(sharding: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = Model()
    model = copy.deepcopy(alone)
    for block in model.blocks:
        fully_shard(block, sharding=sharding)
    fully_shard(model, sharding=sharding)
    assert late_modules(model) == []
    for stage in range(4):
        if stage:
            add(alone, stage)
            add(model, stage)
            late = late_modules(model)
            if stage == 1:
                assert late == [[model.head]]
            else:
                assert [len(each) for each in late] == [2] * 3
            for modules in late:
                fully_shard(modules, sharding=sharding)
            assert late_modules(model) == []
        expected, found = train(alone, 0, 1, stage), train(model, rank, num_ranks, stage)
        assert found == pytest.approx(expected, rel=1e-5), stage
        assert late_modules(model) == []  # the root stays unsharded
        for one, other in zip(whole(model).values(), whole(alone).values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sharding", ["zero3", "zero1", "ddp"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_late_modules_train_as_in_one_process(ranks: int, sharding: str) -> None:
    run_ranks(check_training, ranks, sharding)


def check_strays() -> None:
    model = Model()
    outside = nn.Linear(6, 6)
    model.blocks[0].base.register_module("outside", outside)
    for block in model.blocks:
        fully_shard(block, ignored_params=set(outside.parameters()))
    fully_shard(model, ignored_params=set(outside.parameters()))
    model(torch.ones(1, 6))  # stays unsharded
    assert late_modules(model) == []
    assert late_modules(copy.deepcopy(model)) == []  # its parameters are other objects
    model.blocks[1].scale = nn.Parameter(torch.ones(1))
    model.gain = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"\['gain', 'blocks.1.scale'\] were added to modules"):
        late_modules(model)
    assert late_modules(nn.Linear(2, 2)) == []  # which is not sharded at all


def test_parameters_added_to_sharded_modules_are_named() -> None:
    run_ranks(check_strays, 2)
