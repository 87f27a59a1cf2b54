"""Ranks over NCCL, also more than there are GPUs: the bits of FSDP2."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import RankMismatchError, fully_shard
from vescale_fsdp.testing import run_ranks
from vescale_fsdp.testing.nccl import nccl_group

from .models import TinyGPT, gpt_loss, make, tokens_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def losses_of(shard: Any, **options: Any) -> list[Tensor]:
    model = make(TinyGPT).cuda()
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(5):
        loss = gpt_loss(model, tokens_of(step, dist.get_rank()).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.cpu() for loss in losses]


def of_both(policy: str, sharding: str) -> tuple[list[Tensor], list[Tensor]]:
    with nccl_group():
        expected = losses_of(torch_fully_shard, mp_policy=POLICIES[policy])
        return losses_of(fully_shard, mp_policy=POLICIES[policy], sharding=sharding), expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sharding", ["zero3", "zero2", "zero1", "ddp"])
def test_losses_of_two_ranks_have_the_bits_of_fsdp2(sharding: str, policy: str) -> None:
    for found, expected in run_ranks(of_both, 2, policy, sharding, timeout_s=100):
        assert found == expected


def fail(*_: object) -> None:
    raise ZeroDivisionError


def fail_in_backward(module: nn.Module, args: object, output: Tensor) -> None:
    output.register_hook(fail)


def train(model: nn.Module, num_steps: int, device: str) -> None:
    for step in range(num_steps):
        loss = gpt_loss(model, tokens_of(step, dist.get_rank()).to(device))
        loss.backward()
        model.zero_grad()
        loss.item()  # the host waits for the device


def one_catches(device: str) -> tuple[str, float]:
    model = make(TinyGPT).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    train(model, 2, device)
    begun = time.monotonic()
    if dist.get_rank() == 0:
        handle = model.blocks[0].register_forward_hook(fail_in_backward)
        with pytest.raises(ZeroDivisionError):
            train(model, 1, device)
        handle.remove()
    with pytest.raises(RankMismatchError) as caught:
        train(model, 3, device)
    return str(caught.value), time.monotonic() - begun


def over_nccl() -> tuple[str, float]:
    with nccl_group():
        return one_catches("cuda")


def test_an_exception_that_one_rank_catches_ends_both_in_half_a_minute() -> None:
    (first, first_s), (second, second_s) = run_ranks(over_nccl, 2, timeout_s=60)
    assert "rank 1 did not come" in first
    assert "no longer connected: rank 0 gave up" in second
    assert max(first_s, second_s) < 30
