"""pytorch-forecasting's N-BEATS, trained by Lightning, beside DDP."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from vescale_fsdp.testing import run_ranks

from .helpers import check
from .lightning_run import logged, make_trainer, whole_parameters

# isort: split
import lightning.pytorch as pl  # after the helpers, which let torchvision be imported
import pandas
import pytorch_forecasting as forecasting


def fit(strategy: str, root: Path) -> dict[str, torch.Tensor]:
    waves = [
        {"series": str(s), "time": t, "value": math.sin(t / (3 + s)) + 0.1 * s}
        for s in range(4)
        for t in range(40)
    ]
    rows = forecasting.TimeSeriesDataSet(
        pandas.DataFrame(waves), time_idx="time", target="value", group_ids=["series"],
        max_encoder_length=12, max_prediction_length=4, time_varying_unknown_reals=["value"],
        target_normalizer=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = forecasting.NBeats.from_dataset(
        rows, learning_rate=1e-2, widths=[16, 16], num_blocks=[1, 1], num_block_layers=[2, 2],
        expansion_coefficient_lengths=[3, 3], optimizer="adam", log_interval=-1,
    )  # fmt: skip
    trainer = make_trainer(
        pl, strategy, root, max_epochs=2, limit_train_batches=4, limit_val_batches=2,
        gradient_clip_val=1.0,
    )  # fmt: skip
    loader = rows.to_dataloader(train=False, batch_size=8)
    trainer.fit(model, loader, loader)
    return whole_parameters(model)


def test_nbeats_trains_as_under_ddp(tmp_path: Path) -> None:
    found, expected = (
        run_ranks(fit, 2, strategy, tmp_path)[0] for strategy in ("vescale_fsdp", "ddp")
    )
    for column in ("train_loss_step", "val_loss"):
        check(logged("vescale_fsdp", tmp_path, column), logged("ddp", tmp_path, column), rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
