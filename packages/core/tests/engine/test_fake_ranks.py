"""Torch's fake process group: one process stands for one rank of many, and nobody else answers."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAINING = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale_fsdp import fully_shard

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
for module in (*model, model):
    fully_shard(module)
for _ in range(2):
    model(torch.ones(2, 8)).sum().backward()
assert all(p.grad is not None for p in model.parameters())
"""


ON_STREAMS = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale_fsdp.ranks import waits

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
work = dist.all_reduce(torch.ones(2), async_op=True)
assert not work.is_completed(), "torch's fake work now tells; the engine need not know"
assert waits.Ending(work, has_streams=True).has_ended(0.0)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("program", [TRAINING, ON_STREAMS], ids=["training", "on streams"])
def test_one_rank_of_a_fake_group_goes_on_without_the_others(program: str) -> None:
    # A process of its own: the ranks of the other tests have a default process group already.
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
