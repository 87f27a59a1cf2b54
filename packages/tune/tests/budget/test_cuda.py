"""The peak of a budget on GPUs, beside that of CUDA's allocator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp.testing import run_ranks
from vescale_fsdp.testing.nccl import nccl_group
from vescale_fsdp_tune import Budget, fully_shard, tuning_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


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
            mp_policy=BF16,
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
