"""A process that goes on: the step that was lost is made again as if it had not begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import vescale_fsdp_elastic as elastic
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import worlds
from vescale_fsdp_elastic.losses import RanksHaveChanged

from .helpers import GLOBAL_BATCH, Numbers, make


def scaled(root: Path, lost_in: str | None) -> list[Any]:
    """Train with a scaler in a meeting. In step 3 a rank is lost, and the process goes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_FSDP_MEETING", str(root / "meeting"))
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):  # the meeting sets them
            patch.setenv(name, "")
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        patch.setattr(worlds, "_joined", worlds._Joined())
        dist.destroy_process_group()
        elastic.init_process_group("gloo")
        model, optimizer, _ = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        losses, lost = [], []
        with elastic.training(
            root / "run", model, optimizer, stateful={"scaler": scaler}, every=1,
            memory_directory=root / "memory", signals=(),
        ) as run:  # fmt: skip

            def point(name: str, number: int) -> None:
                if (name, number) == (lost_in, 3) and not lost:
                    lost.append(run.attempt)
                    raise RanksHaveChanged

            for step in run.batches(Numbers(), global_batch=GLOBAL_BATCH, until=6):
                with step:
                    for x, y in step:
                        step.backward(scaler.scale(torch.nn.functional.mse_loss(model(x), y)))
                    scaler.unscale_(optimizer)
                    point("after unscale_", step.number)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    point("after step", step.number)
                    scaler.update()
                    optimizer.zero_grad()
                    losses.append(step.mean_loss())
            assert run.attempt == 1 + len(lost)
    return losses


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", ["after unscale_", "after step"])
def test_a_scaler_unscales_the_gradients_of_a_step_that_comes_again(
    tmp_path: Path, place: str
) -> None:
    quiet = run_ranks(scaled, 1, tmp_path / "quiet", None)
    assert run_ranks(scaled, 1, tmp_path / "torn", place) == quiet
