"""Ranks over NCCL, also more than there are GPUs: the bits of FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import fully_shard
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
