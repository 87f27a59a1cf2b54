"""Elastic training with the Trainer: ranks come and go, and each step is that of a quiet run."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from vescale_fsdp.ranks import collectives
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import ElasticOptions
from vescale_fsdp_lightning import VeScaleFSDPStrategy, load_from_checkpoint

from .lit import make_trainer

GLOBAL_BATCH, NUM_SAMPLES, WIDTH = 11, 64, 6  # 5 steps an epoch, micro-batches of 1 to 3
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

    def __init__(self, stop_at: int | None, signal_at: int | None, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)),
            nn.Dropout(dropout),
            nn.Linear(WIDTH, 1),
        )
        self.stop_at, self.signal_at = stop_at, signal_at
        self.losses, self.rates = Losses(), Losses()
        self.micro: list[torch.Tensor] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is not None:  # what the run has restored does not change
            for each in checkpoint["state_dict"].values():
                each.zero_()
            checkpoint.pop("optimizer_states")

    def on_train_start(self) -> None:
        torch.rand(1)  # hooks may draw numbers

    def loss(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.layers(x), x.sin().sum(1, keepdim=True))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.stop_at:
            self.trainer.strategy.elastic_run._keeper.finish()  # type: ignore[union-attr]
            raise Stop
        if self.global_step == self.signal_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
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
        collectives.all_reduce(total, group).wait()
        step = self.global_step - 1
        global_batch = self.trainer.strategy.options.elastic.global_batch  # type: ignore[attr-defined]
        self.losses[step] = float(total) / global_batch
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
    signal_at: int | None = None,
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
    module, counts = Lit(stop_at, signal_at, dropout), Counts()
    chosen_options = {"max_steps": 12, "callbacks": [counts], "val_check_interval": 2, **options}
    trainer = make_trainer(strategy, root, **chosen_options)
    sources: list[str] = []
    restore = trainer.strategy.setup

    def setup(trainer: pl.Trainer) -> None:
        restore(trainer)
        sources.append(trainer.strategy.elastic_run.source)

    trainer.strategy.setup = setup  # type: ignore[method-assign]
    code = None
    train = DataLoader(data(), batch_size=micro_batch, shuffle=True)
    try:
        trainer.fit(module, train, DataLoader(data(8), batch_size=2))
    except (Stop, SystemExit) as error:
        code = getattr(error, "code", None)
    return {
        "code": code,
        "losses": module.losses,
        "rates": module.rates,
        "counts": counts.state_dict(),
        "source": sources[0],
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


def test_two_ranks_go_on_to_the_bit_with_random_numbers(tmp_path: Path) -> None:
    """By epochs, from memory after an error, and from disk after a signal and a loss of memory."""
    options: dict[str, Any] = {"max_epochs": 3, "max_steps": -1, "val_check_interval": 1.0}
    options |= {"dropout": 0.3, "ranks_per_host": 1, "elastic": {"global_batch": 12}}
    quiet = run_ranks(attempt, 2, tmp_path / "quiet", None, options)
    torn = tmp_path / "torn"
    sources = []
    for stop_at, signal_at in ((3, None), (None, 9), (None, None)):
        found = run_ranks(attempt, 2, torn, stop_at, {**options, "signal_at": signal_at})
        for each, expected in zip(found, quiet, strict=True):
            assert each["losses"]
            for step, loss in each["losses"].items():
                assert loss == expected["losses"][step], step
        sources.append((found[0]["source"], min(found[0]["losses"]), found[0]["code"]))
        if signal_at is not None:
            assert max(found[0]["losses"]) in (9, 10)
            assert [each["code"] for each in found] == [143, 143]
            for host in ("host0", "host1"):
                shutil.rmtree(torn / host)
    assert sources[:2] == [("start", 0, None), ("memory", 2, 143)]
    assert sources[2][0] == "disk"
    assert sources[2][1] in (10, 11)
    assert found[0]["counts"] == quiet[0]["counts"] == {"epochs": 3, "validations": 3}


def test_a_training_that_is_done_ends_at_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 3, "ranks_per_host": 1}
    assert run_ranks(attempt, 1, tmp_path, None, options)[0]["losses"].keys() == {0, 1, 2}
    (saved,) = (tmp_path / "run").glob("step-3-*")
    own = {"stop_at": None, "signal_at": None, "dropout": 0.0}
    loaded, new = load_from_checkpoint(Lit, saved, **own), Lit(**own)
    for each, fresh in zip(loaded.parameters(), new.parameters(), strict=True):
        assert each.shape == fresh.shape
        assert not torch.equal(each, fresh)
    again = run_ranks(attempt, 1, tmp_path, None, options)[0]
    assert (again["source"], again["losses"]) == ("disk", {})
    more = run_ranks(attempt, 1, tmp_path, None, {**options, "max_steps": 7})[0]
    assert (more["source"], min(more["losses"])) == ("disk", 3)


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__(None, None, 0.0)
        self.automatic_optimization = False


def refused(root: Path, options: dict[str, Any], message: str, module: str = "Lit") -> None:
    loader = options.pop("loader", DataLoader(data(), batch_size=2))
    elastic = {"directory": str(root), "global_batch": 4}
    trainer = make_trainer(VeScaleFSDPStrategy(elastic=elastic), root, max_steps=2, **options)
    made = Manual() if module == "Manual" else Lit(None, None, 0.0)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        trainer.fit(made, loader, DataLoader(data(8), batch_size=2))


def all_refused(root: Path) -> None:
    refused(root, {"accumulate_grad_batches": 2}, "leave accumulate_grad_batches out")
    refused(root, {"overfit_batches": 2}, "leave overfit_batches out")
    refused(root, {"fast_dev_run": 2}, "whose next run would continue")
    refused(root, {}, "automatic_optimization=False", "Manual")
    sampler = WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES)
    weighted = DataLoader(data(), batch_size=2, sampler=sampler)
    refused(root, {"loader": weighted}, "a loader with a WeightedRandomSampler")
    two = {"a": DataLoader(data(), batch_size=2), "b": DataLoader(data(), batch_size=2)}
    refused(root, {"loader": two}, "one torch.utils.data.DataLoader as train_dataloader, got dict")
    refused(root, {"callbacks": [pl.callbacks.GradientAccumulationScheduler({1: 2})]}, "leave it")
    refused(root, {"callbacks": [pl.callbacks.LearningRateFinder()]}, "become those of the run")
    elastic = {"directory": str(root), "global_batch": 4}
    trainer = make_trainer(VeScaleFSDPStrategy(elastic=elastic), root, max_steps=2)
    with pytest.raises(NotImplementedError, match="Use it, or the Tuner, with a Trainer"):
        Tuner(trainer).lr_find(Lit(None, None, 0.0), DataLoader(data(), 2), DataLoader(data(8), 2))
    assert not list(root.glob("step-*"))


def test_what_cannot_follow_the_number_of_ranks_is_refused(tmp_path: Path) -> None:
    run_ranks(all_refused, 1, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elastic": {"directory": "runs"}}, "a mapping with directory and global_batch"),
        ({"elastic": {"directory": "runs", "global_batch": 0}}, "an int of at least 1"),
        ({"tensor_parallel_size": 2}, "leave tensor_parallel_size out"),
        ({"device_mesh": (1, 2)}, "leave device_mesh out"),
    ],
)
def test_options_that_do_not_work_are_refused(options: dict[str, Any], message: str) -> None:
    elastic = {"directory": "runs", "global_batch": 4}
    with pytest.raises(ValueError, match=message):
        VeScaleFSDPStrategy(**{"elastic": elastic, **options})
