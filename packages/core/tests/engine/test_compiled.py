"""Compiled models: Dynamo compiles in the first two steps, and not again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp.testing import run_ranks

from .helpers import shard_units
from .models import TinyGPT, gpt_loss, make, tokens_of

WORLD_SIZE = 2


def losses_of_ten_steps(whole: bool, compiled: bool) -> list[float]:
    """Raises from the third step on if Dynamo compiles again: a guard of its code has failed."""
    torch._dynamo.reset()
    model = make(TinyGPT)
    shard_units(model, model.blocks)
    if compiled:
        for part in [model] if whole else model.blocks:
            part.compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(10):
        # The first step records the order of the units, and the second is the first to follow it.
        with torch._dynamo.config.patch(error_on_recompile=step >= 2):
            loss = gpt_loss(model, tokens_of(step, dist.get_rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Dynamo looks for ``.grad`` where there is none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
def test_dynamo_does_not_compile_again_from_the_third_step_on(whole: bool) -> None:
    expected = run_ranks(losses_of_ten_steps, WORLD_SIZE, whole, False)
    assert run_ranks(losses_of_ten_steps, WORLD_SIZE, whole, True) == expected
