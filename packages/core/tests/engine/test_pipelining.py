"""Pipelines of torch train sharded stages as one process does, also where they split a backward."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import vescale_fsdp
from vescale_fsdp.testing import run_ranks

from .models import make

NUM_MICRO_BATCHES, NUM_STEPS = 4, 3
CAN_DEFER = "finalize_gradients" in inspect.signature(Schedule1F1B.step).parameters
since_2_15 = pytest.mark.skipif(not CAN_DEFER, reason="since torch 2.15")


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


def expected(num_stages: int, num_calls: int) -> list[nn.Module]:
    """The stages after the training in one process."""
    stages: list[nn.Module] = [make(Chunk, seed=seed) for seed in range(num_stages)]
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=0.01)
    for step in range(NUM_STEPS):
        for call in range(num_calls):
            for batch in batches(num_calls * step + call):
                for x in batch.chunk(NUM_MICRO_BATCHES):
                    out = x
                    for stage in stages:
                        out = stage(out)
                    (loss_of(out, x) / (2 * NUM_MICRO_BATCHES)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return stages


def check(
    kind: Any, shard: Any, options: dict[str, Any], num_calls: int = 1, **of_schedule: Any
) -> None:
    """Train.

    Args:
        num_calls: of the schedule before the optimizer steps. Only the last one reduces.
        of_schedule: its options.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    number, data_rank = (mesh.get_local_rank(name) for name in ("stage", "data"))
    is_v = kind in (ScheduleDualPipeV, ScheduleZBVZeroBubble)
    indices = [number, 3 - number if is_v else number + 2]
    if kind is Schedule1F1B:  # one stage on each rank
        del indices[1]
    num_stages = 2 * len(indices)
    mine: dict[int, nn.Module] = {}
    for index in indices:
        mine[index] = make(Chunk, seed=index)
        for block in mine[index].blocks:  # type: ignore[union-attr]
            shard(block, mesh=mesh["data"], **options)
        shard(mine[index], mesh=mesh["data"], **options)
    group, device = mesh.get_group("stage"), torch.device("cpu")
    stages = [PipelineStage(m, i, num_stages, device, group=group) for i, m in mine.items()]

    def loss(out: Tensor, target: Tensor) -> Tensor:
        scales = of_schedule.get("scale_grads", True)
        return loss_of(out, target) / (1 if scales else NUM_MICRO_BATCHES)

    schedule = kind(
        stages[0] if kind is Schedule1F1B else stages,
        n_microbatches=NUM_MICRO_BATCHES,
        loss_fn=loss,
        **of_schedule,
    )
    params = [param for model in mine.values() for param in model.parameters()]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    for step in range(NUM_STEPS):
        for call in range(num_calls):
            batch = batches(num_calls * step + call)[data_rank]
            defers = {"finalize_gradients": False} if call < num_calls - 1 else {}
            schedule.step(*([batch] if 0 in mine else []), target=batch, **defers)
            if "1F1B" in kind.__name__:  # else backwards of weights alone set ``.grad`` themselves
                assert (params[0].grad is None) == bool(defers)
        assert all(a is b for a, b in zip(params, _params(mine), strict=True))
        optimizer.step()
        optimizer.zero_grad()
    for index, stage in enumerate(expected(num_stages, num_calls)):
        for name, param in mine[index].named_parameters() if index in mine else ():
            wanted: Any = stage.get_parameter(name)
            whole: Any = param.full_tensor()  # type: ignore[attr-defined]
            torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-5, msg=name)


def _params(mine: dict[int, nn.Module]) -> list[nn.Parameter]:
    return [param for model in mine.values() for param in model.parameters()]


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


def check_whole_backwards() -> None:
    for kind in (Schedule1F1B, ScheduleInterleaved1F1B):
        check(kind, vescale_fsdp.fully_shard, {}, scale_grads=False)
        check(kind, vescale_fsdp.fully_shard, {"reshard_after_forward": False})


def test_so_does_one_of_whole_backwards() -> None:
    run_ranks(check_whole_backwards, 4)


def check_deferred() -> None:
    for kind in (Schedule1F1B, ScheduleInterleavedZeroBubble):
        check(kind, vescale_fsdp.fully_shard, {}, num_calls=2)


@since_2_15
def test_its_reductions_may_wait_for_a_later_call() -> None:
    run_ranks(check_deferred, 4)


def check_waits() -> None:
    for kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        check(kind, vescale_fsdp.fully_shard, {}, defer_reduce_grad_wait=True)


@since_2_15
def test_its_reductions_may_end_while_it_computes() -> None:
    run_ranks(check_waits, 4)


@pytest.mark.nightly
def test_so_it_does_on_fsdp2() -> None:
    run_ranks(check, 4, ScheduleZBVZeroBubble, fsdp2, {"reshard_after_forward": False})
