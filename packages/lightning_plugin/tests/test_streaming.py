"""Whole parameters as a stream and profiles, while a Trainer trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import ProfileSteps

from .lit import assert_equal, fit, full_parameters


class Send(pl.Callback):
    """Takes the parameters after each batch, as a callback for an inference engine would."""

    def __init__(self) -> None:
        self.taken: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        taken = dict(trainer.strategy.stream_parameters(bucket_bytes=4096))
        expected = full_parameters(pl_module)
        assert list(taken) == list(expected)
        for name, param in expected.items():
            assert torch.equal(taken[name], param)
        self.taken.append(taken)


def check(root: Path) -> None:
    expected = fit("vescale_fsdp", root)
    send = Send()
    assert_equal(fit("vescale_fsdp", root, callbacks=[send]), expected)
    assert len(send.taken) == 6
    for name, param in expected[1].items():
        assert torch.equal(send.taken[-1][name], param)


def test_a_callback_takes_whole_parameters_after_each_step(tmp_path: Path) -> None:
    run_ranks(check, 2, tmp_path)


def check_profile(root: Path) -> None:
    expected = fit("vescale_fsdp", root)
    callback = ProfileSteps(root / "trace", steps=2, warmup=2)
    assert_equal(fit("vescale_fsdp", root, callbacks=[callback]), expected)
    assert callback.report.optimizer > 0
    assert callback.report.total("compute") > 0
    callback = ProfileSteps(steps=20, warmup=2)  # more than there are
    fit("vescale_fsdp", root, callbacks=[callback])
    assert callback.report.step > 0


def test_a_callback_profiles_some_batches(tmp_path: Path) -> None:
    run_ranks(check_profile, 2, tmp_path)
    assert {each.name for each in (tmp_path / "trace").iterdir()} == {"rank-0.json", "rank-1.json"}
