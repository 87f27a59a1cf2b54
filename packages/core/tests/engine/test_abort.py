"""An exception on one rank, which catches it, where devices wait for collectives as with NCCL."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import RankMismatchError, fully_shard
from vescale_fsdp.engine import engine
from vescale_fsdp.ranks import alarm
from vescale_fsdp.testing import run_ranks

from .accelerator import DEVICE, NCCLLike, nccl_like_world


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step(model: nn.Sequential, *, raises: bool = False) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    def in_forward(module: nn.Module, args: object, output: Tensor) -> None:
        if raises:
            output.register_hook(broken)

    handle = model[1].register_forward_hook(in_forward)
    try:
        model(torch.ones(2, 8, device=DEVICE)).square().sum().backward()
    finally:
        handle.remove()
    model.zero_grad()


def several_steps(model: nn.Sequential) -> None:
    for _ in range(3):
        step(model)


def one_catches(num_steps: int) -> tuple[str, float, list[int]]:
    with (
        mock.patch.object(engine, "MEETING_TIMEOUT_S", 1.0),
        mock.patch.object(alarm, "LOOK_S", 0.2),
        nccl_like_world(),
    ):
        model = make()
        for _ in range(num_steps):
            step(model)
        begun = time.monotonic()
        if dist.get_rank() == 0:
            with pytest.raises(ZeroDivisionError):
                step(model, raises=True)
        with pytest.raises(RankMismatchError) as caught:
            several_steps(model)
        seconds = time.monotonic() - begun
        with pytest.raises(RankMismatchError, match="no longer connected"):
            step(model)
        present = alarm.present()
        assert present is not None
        present.join()  # it may still abort communicators
        groups = dist.distributed_c10d._world.pg_map
        return (
            str(caught.value),
            seconds,
            [group.num_aborts for group in groups if isinstance(group, NCCLLike)],
        )


@pytest.mark.parametrize("num_steps", [0, 2])
def test_an_exception_that_one_rank_catches_ends_all_with_a_named_error(num_steps: int) -> None:
    found = run_ranks(one_catches, 3, num_steps, timeout_s=60)
    texts, seconds, num_aborts = zip(*found, strict=True)
    assert max(seconds) < 15
    assert all({*each} == {1} and len(each) >= 3 for each in num_aborts)  # ours, and the user's
    for text in texts[1:]:
        assert "the ranks are no longer connected: rank 0 gave up" in text
