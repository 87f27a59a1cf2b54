"""What an attempt makes at its beginning, so that nothing waits later for a rank that has died."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import vescale_fsdp_elastic as elastic
from vescale_fsdp import checkpoint
from vescale_fsdp.testing import run_ranks

from .helpers import GLOBAL_BATCH, Numbers, make


def makes_no_group_after_its_first_step(root: Path) -> list[str]:
    """A rank that has died would never come to it, and torch waits for it until its timeout."""
    model, optimizer, _ = make()
    both = torch.nn.ModuleDict({"units": model, "head": torch.nn.Linear(1, 1)})
    place = {"memory_directory": root / "m"}
    with (
        pytest.raises(ValueError, match=r"elastic\.training: 'head\.weight', .* to no unit"),
        elastic.training(root / "by hand", both, optimizer, **place),
    ):
        pass
    with elastic.training(root / "by hand", both, optimizer, **place, reduced_by_hand=True):
        pass  # saves at its end
    with pytest.MonkeyPatch.context() as patch:
        with elastic.training(
            root / "run", model, optimizer, every=3, every_on_disk=4, memory_directory=root / "m"
        ) as run:
            for step in run.batches(Numbers(), global_batch=GLOBAL_BATCH, until=7):
                for x, y in step:
                    step.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                step.mean_loss()
                patch.setattr(dist, "new_group", None)  # the engine has made its own in the forward
        checkpoint.save(root / "weights", model)
    return sorted(each.name for each in (root / "run").glob("step-*"))


def test_a_training_makes_no_group_after_its_first_step(tmp_path: Path) -> None:
    saved = run_ranks(makes_no_group_after_its_first_step, 2, tmp_path)
    assert saved == [["step-4-attempt-1", "step-7-attempt-1"]] * 2
