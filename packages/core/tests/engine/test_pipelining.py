"""Pipelines of torch that split a backward train sharded stages as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import vescale_fsdp
from vescale_fsdp.testing import run_ranks

from .helpers import with_pipelines_before_2_15
from .models import make

NUM_STAGES, NUM_MICRO_BATCHES, NUM_STEPS = 4, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.frozen(self.down(torch.tanh(self.up(self.norm(x)))))


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def batches(step: int) -> Tensor:  # [data rank, sample, 5]
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 2 * NUM_MICRO_BATCHES, 5, generator=generator)


def expected() -> list[nn.Module]:
    """The stages after the training in one process."""
    stages: list[nn.Module] = [make(Chunk, seed=seed) for seed in range(NUM_STAGES)]
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=0.01)
    for step in range(NUM_STEPS):
        for batch in batches(step):
            for x in batch.chunk(NUM_MICRO_BATCHES):
                out = x
                for stage in stages:
                    out = stage(out)
                (loss_of(out, x) / (2 * NUM_MICRO_BATCHES)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return stages


def check(kind: Any, shard: Any, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    number, data_rank = (mesh.get_local_rank(name) for name in ("stage", "data"))
    is_v = kind in (ScheduleDualPipeV, ScheduleZBVZeroBubble)
    mine: dict[int, nn.Module] = {}
    for index in (number, NUM_STAGES - 1 - number if is_v else number + 2):
        mine[index] = make(Chunk, seed=index)
        for block in mine[index].blocks:  # type: ignore[union-attr]
            shard(block, mesh=mesh["data"], **options)
        shard(mine[index], mesh=mesh["data"], **options)
    group, device = mesh.get_group("stage"), torch.device("cpu")
    stages = [PipelineStage(m, i, NUM_STAGES, device, group=group) for i, m in mine.items()]
    schedule = kind(stages, n_microbatches=NUM_MICRO_BATCHES, loss_fn=loss_of)
    params = [param for model in mine.values() for param in model.parameters()]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    for step in range(NUM_STEPS):
        batch = batches(step)[data_rank]
        schedule.step(*([batch] if 0 in mine else []), target=batch)
        assert all(a is b for a, b in zip(params, _params(mine), strict=True))
        optimizer.step()
        optimizer.zero_grad()
    for index, stage in enumerate(expected()):
        for name, param in mine[index].named_parameters() if index in mine else ():
            wanted: Any = stage.get_parameter(name)
            whole: Any = param.full_tensor()  # type: ignore[attr-defined]
            torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-5, msg=name)


def _params(mine: dict[int, nn.Module]) -> list[nn.Parameter]:
    return [param for model in mine.values() for param in model.parameters()]


pytestmark = with_pipelines_before_2_15

OPTIONS: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": False},
    {"sharding": "zero1"},
    {"sharding": "ddp"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble])
@pytest.mark.sampled(1)
def test_a_zero_bubble_pipeline_trains_as_one_process(kind: Any, options: dict[str, Any]) -> None:
    run_ranks(check, 4, kind, vescale_fsdp.fully_shard, options)


def test_so_does_one_of_both_directions() -> None:
    run_ranks(check, 4, ScheduleDualPipeV, vescale_fsdp.fully_shard, {})


@pytest.mark.nightly
def test_so_it_does_on_fsdp2() -> None:
    run_ranks(check, 4, ScheduleZBVZeroBubble, fsdp2, {"reshard_after_forward": False})
