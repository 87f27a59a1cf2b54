"""Elastic training with the Trainer: ranks come and go, and each step is that of a quiet run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from vescale_fsdp import compat
from vescale_fsdp.elastic import ElasticOptions
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import VeScaleFSDPStrategy

from .lit import make_trainer

GLOBAL_BATCH, NUM_SAMPLES, WIDTH = 12, 64, 6  # 5 steps an epoch
Losses = dict[int, float]


class Stop(Exception):
    """What ends an attempt."""


class Counts(pl.Callback):
    """Has a state: the number of epochs and of validations."""

    def __init__(self) -> None:
        self.epochs = self.validations = 0

    def on_train_epoch_end(self, *_: Any) -> None:
        self.epochs += 1

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.validations += not trainer.sanity_checking

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs, "validations": self.validations}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs, self.validations = state["epochs"], state["validations"]


class Lit(pl.LightningModule):
    """Records the loss of each step over the global batch; two schedulers, one by validation."""

    def __init__(self, stop_at: int | None, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)),
            nn.Dropout(dropout),
            nn.Linear(WIDTH, 1),
        )
        self.stop_at, self.losses, self.rates = stop_at, Losses(), Losses()
        self.micro: list[torch.Tensor] = []

    def loss(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.layers(x), x.sin().sum(1, keepdim=True))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.stop_at:
            self.trainer.strategy._elastic._run._keeper.finish()  # type: ignore[union-attr]
            raise Stop
        loss = self.loss(batch)
        self.micro.append(loss.detach().double() * len(batch[0]))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.fit_loop._should_accumulate():
            return
        total = torch.stack(self.micro).sum()
        self.micro.clear()
        group = dist.group.WORLD
        assert group is not None
        compat.all_reduce(total, group).wait()
        step = self.global_step - 1
        self.losses[step] = float(total) / GLOBAL_BATCH
        self.rates[step] = self.trainer.optimizers[0].param_groups[0]["lr"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
        return [optimizer], [
            {"scheduler": steps, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


def data(num: int = NUM_SAMPLES) -> TensorDataset:
    return TensorDataset(torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(3)))


def fit(
    root: Path,
    stop_at: int | None,
    *,
    dropout: float = 0.0,
    ranks_per_host: int = 2,
    micro_batch: int = 3,
    elastic: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    logging.getLogger("vescale_fsdp").setLevel(logging.ERROR)
    memory = root / f"host{dist.get_rank() // ranks_per_host}"
    chosen = ElasticOptions(
        **{
            "directory": root / "run",
            "global_batch": GLOBAL_BATCH,
            "every": 2,
            "every_on_disk": None,
            "memory_directory": memory,
            **(elastic or {}),
        }
    )
    strategy = VeScaleFSDPStrategy(elastic=chosen)
    torch.manual_seed(0)
    module, counts = Lit(stop_at, dropout), Counts()
    chosen_options = {"max_steps": 12, "callbacks": [counts], "val_check_interval": 2, **options}
    trainer = make_trainer(strategy, root, **chosen_options)
    sources: list[str] = []
    restore = trainer.strategy.setup

    def setup(trainer: pl.Trainer) -> None:
        restore(trainer)
        sources.append(trainer.strategy._elastic._run.source)

    trainer.strategy.setup = setup  # type: ignore[method-assign]
    train = DataLoader(data(), batch_size=micro_batch, shuffle=True)
    try:
        trainer.fit(module, train, DataLoader(data(8), batch_size=2))
    except Stop:
        pass
    return {
        "losses": module.losses,
        "rates": module.rates,
        "counts": counts.state_dict(),
        "source": sources[0],
        "accumulates": trainer.accumulate_grad_batches,
        "epoch": trainer.current_epoch,
        "logged": trainer.fit_loop.epoch_loop._batches_that_stepped,
    }


def attempt(root: Path, stop_at: int | None, options: dict[str, Any]) -> dict[str, Any]:
    return fit(root, stop_at, **options)


def test_from_4_to_3_to_2_to_4_ranks(tmp_path: Path) -> None:
    quiet = run_ranks(attempt, 4, tmp_path / "quiet", None, {})[0]
    assert len(set(quiet["rates"].values())) > 3, "both schedulers have stepped"
    losses: Losses = {}
    rates: Losses = {}
    begun = []
    # 5 steps an epoch, validation after 2: the second attempt begins with an epoch's last step.
    for ranks, stop_at in ((4, 5), (3, 7), (2, 11), (4, None)):
        torn = run_ranks(attempt, ranks, tmp_path / "torn", stop_at, {})[0]
        losses |= torn["losses"]
        rates |= torn["rates"]
        begun.append((torn["source"], min(torn["losses"])))
    assert begun == [("start", 0), ("memory", 4), ("memory", 6), ("memory", 10)]
    assert losses.keys() == quiet["losses"].keys() == set(range(12))
    for step, loss in quiet["losses"].items():
        assert losses[step] == pytest.approx(loss, abs=1e-6), step
    assert rates == quiet["rates"]
    for name in ("counts", "epoch", "logged"):
        assert torn[name] == quiet[name], name
