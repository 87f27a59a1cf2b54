"""Ranks over NCCL, also more than there are GPUs: the bits of FSDP2, and the peak of a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import Budget, fully_shard, tuning_of
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


class Wide(nn.Module):
    """Blocks that are large beside the rounding of the allocator."""

    def __init__(self) -> None:
        super().__init__()
        pairs = ((nn.Linear(512, 2048), nn.Linear(2048, 512)) for _ in range(6))
        self.blocks = nn.ModuleList(nn.Sequential(up, nn.GELU(), down) for up, down in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def peaks_within(memory: str) -> tuple[int, int]:
    """The predicted peak, and that of CUDA's allocator."""
    with nccl_group():
        torch.manual_seed(0)
        x = torch.randn(2048, 512).cuda()
        model = fully_shard(
            Wide(),
            budget=Budget(memory, inputs=x, optimizer="adamw_fused"),
            mp_policy=POLICIES["bf16"],
        )
        tuning = tuning_of(model)
        assert tuning is not None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for step in range(4):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return tuning.chosen.peak_bytes, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("memory", ["80%", "300MB"])
def test_the_peak_of_a_budget_is_at_most_the_predicted_one(memory: str) -> None:
    for predicted, found in run_ranks(peaks_within, 2, memory, timeout_s=100):
        assert found <= predicted <= 1.1 * found
