"""After a loss ``fit`` is called again in the same process, and equals an undisturbed one."""

from __future__ import annotations

import csv
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from vescale_fsdp import RankMismatchError
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import worlds
from vescale_fsdp_elastic.losses import RanksHaveChanged
from vescale_fsdp_lightning import ShardedEMA, VeScaleFSDPStrategy
from vescale_fsdp_lightning.elastic.held import follow_ranks, keep_metrics

WIDTH = 6


class Lit(pl.LightningModule):
    """With buffers, random numbers and metrics. ``lost`` raises where it is told to, once."""

    def __init__(self, lost: dict[str, Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        self.mae = torchmetrics.MeanAbsoluteError()
        self.lost, self.setups, self.losses = lost, 0, dict[int, float]()

    def setup(self, stage: str) -> None:
        self.setups += 1

    def point(self, place: str) -> None:
        if self.lost.get(place) == self.global_step and not self.trainer.sanity_checking:
            if not self.lost.get("again"):
                del self.lost[place]
            raise self.lost.get("error", RanksHaveChanged)("as if a rank was lost")

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (x,) = batch
        found, wanted = self.net(x), x.sin().sum(1, keepdim=True)
        return nn.functional.mse_loss(found, wanted), found, wanted

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, _, _ = self.loss(batch)
        self.losses[self.global_step] = loss.item()
        self.log("loss", loss)
        self.point("step")
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.point("optimizer")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, found, wanted = self.loss(batch)
        self.mae.update(found, wanted)
        self.log("val_loss", loss, sync_dist=True)
        if batch_idx == 1:
            self.point("validation")

    def on_validation_epoch_end(self) -> None:
        self.log("mae", self.mae.compute())
        self.mae.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]


class Evaluations(pl.Callback):
    """What validations have found, and with which learning rate: once for each that has ended."""

    def __init__(self) -> None:
        self.found: dict[int, Any] = {}

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            values = {name: float(each) for name, each in trainer.callback_metrics.items()}
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self.found[trainer.global_step] = (values["mae"], values["val_loss"], rate)


def data(num: int) -> TensorDataset:
    return TensorDataset(torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(3)))


def fit(root: Path, lost: dict[str, Any]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of folders that are not empty, as after any restart
        for name, value in {
            "VESCALE_FSDP_MEETING": str(root / "meeting"), "TORCHELASTIC_RUN_ID": "test",
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "", "GROUP_RANK": "0", "VESCALE_FSDP_HOSTS": "1:1",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        patch.setattr(worlds, "_joined", worlds._Joined())
        dist.destroy_process_group()
        handler = signal.getsignal(signal.SIGTERM)
        elastic = {
            "directory": root / "run", "global_batch": 8, "every": lost.get("every", 2),
            "every_on_disk": None, "memory_directory": root / "memory",
        }  # fmt: skip
        strategy = VeScaleFSDPStrategy(elastic=elastic)
        saver = ModelCheckpoint(root / "saved", "{step}", monitor="val_loss", save_top_k=-1)
        late = ModelCheckpoint(  # it waits for the metric of the validation after its step
            root / "late", "{step}", monitor="val_loss", save_top_k=-1, every_n_train_steps=4
        )
        evaluations, average = Evaluations(), ShardedEMA(0.9)
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_epochs=3, val_check_interval=2,
            callbacks=[saver, late, evaluations, average], logger=CSVLogger(root, "csv", version=0),
            enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        )  # fmt: skip
        torch.manual_seed(0)
        module = Lit(dict(lost))
        train = DataLoader(data(32), batch_size=4, shuffle=True, num_workers=0)
        trainer.fit(module, train, DataLoader(data(12), batch_size=4))
        optimizers = [*trainer.optimizers, *strategy._companions.values()]
        with (root / "csv" / "version_0" / "metrics.csv").open() as file:
            logged = {row["step"]: row["loss"] for row in csv.DictReader(file) if row["loss"]}
    states = [
        value.full_tensor() if hasattr(value, "full_tensor") else value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ]
    return {
        "setups": module.setups,
        "losses": module.losses,
        "evaluations": evaluations.found,
        "logged": logged,
        # Lightning names a file that is saved again with a version.
        "saved": {each.name.replace("-v1", "") for each in (root / "saved").iterdir()},
        "best": [Path(each).name.replace("-v1", "") for each in saver.best_k_models],
        "late": [Path(each).name.replace("-v1", "") for each in late.best_k_models],
        "handler": signal.getsignal(signal.SIGTERM) == handler,
        "model": [each.full_tensor() for each in module.parameters()],
        "buffers": [*module.buffers()],
        "states": states,
        "training": module.training,
        "step": trainer.global_step,
    }


@pytest.mark.parametrize(
    "lost",
    [
        {"step": 7},
        {"optimizer": 5},
        {"validation": 8},
        {"step": 7, "every": 4},
        {"validation": 8, "every": 5},
    ],
)
def test_a_fit_that_goes_on_is_an_undisturbed_one(tmp_path: Path, lost: dict[str, int]) -> None:
    (quiet,) = run_ranks(fit, 1, tmp_path / "quiet", {})
    (torn,) = run_ranks(fit, 1, tmp_path / "torn", lost)
    assert (quiet.pop("setups"), torn.pop("setups")) == (1, 2)
    for name in ("model", "buffers", "states"):
        mine, theirs = torn.pop(name), quiet.pop(name)
        assert len(mine) == len(theirs) > 0
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert torn == quiet


def fails(root: Path, lost: dict[str, Any]) -> str:
    kind = lost["error"]
    with pytest.raises(kind, match="as if") as caught:
        fit(root, lost)
    return str(caught.value)


@pytest.mark.parametrize("kind", [ValueError, RankMismatchError])
def test_an_error_of_this_process_ends_it(tmp_path: Path, kind: type[Exception]) -> None:
    """Also one that looks like a loss, and comes again in the same step with the same ranks."""
    run_ranks(fails, 1, tmp_path, {"step": 5, "error": kind, "again": True})


def divided() -> list[int]:
    sampler = DistributedSampler(range(10), 4, 3, shuffle=False)
    sampler.set_epoch(5)
    follow_ranks(sampler)
    follow_ranks(None)
    assert (sampler.epoch, sampler.num_replicas) == (5, 2)
    return list(sampler)


def test_a_sampler_that_is_kept_follows_the_ranks() -> None:
    assert run_ranks(divided, 2) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_logs_of_a_main_process_that_was_lost_are_kept(tmp_path: Path) -> None:
    for number in (1, 2):
        logger = CSVLogger(tmp_path, "csv", version=0)
        keep_metrics(logger)
        logger.log_metrics({"loss": float(number)}, step=1)
        logger.save()
        keep_metrics(logger)  # its own are not touched
    folder = tmp_path / "csv" / "version_0"
    assert "1.0" in (folder / "metrics.1.csv").read_text()
    assert "2.0" in (folder / "metrics.csv").read_text()
