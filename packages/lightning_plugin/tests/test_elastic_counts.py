"""Numbers of an elastic training count optimizer steps and samples, not micro-batches."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import ElasticOptions
from vescale_fsdp_lightning import VeScaleFSDPStrategy

from .lit import make_trainer

GLOBAL_BATCH, NUM_SAMPLES, WIDTH = 4, 64, 4  # 16 steps an epoch


class Stop(Exception):
    """What ends an attempt."""


class Lit(pl.LightningModule):
    """Records what each step has seen."""

    def __init__(self, stop_at: int | None = None, frequency: int | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)
        self.stop_at, self.frequency = stop_at, frequency
        self.seen: dict[int, list[int]] = {}  # samples of this rank
        self.rates: dict[int, float] = {}
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.stop_at:
            self.trainer.strategy.elastic_run._keeper.finish()  # type: ignore[union-attr]
            raise Stop
        x, index = batch
        self.seen.setdefault(self.global_step, []).extend(index.tolist())
        self.rates.setdefault(self.global_step, self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.net(x).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.global_step)
        self.log("val_loss", float(self.global_step), sync_dist=True)  # grows

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        if self.frequency is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        config = {"scheduler": scheduler, "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


def loader(batch_size: int, num: int = NUM_SAMPLES) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(num, WIDTH), torch.arange(num)), batch_size)


def fit(
    root: Path,
    micro_batch: int,
    module: Lit | None = None,
    *,
    elastic: dict[str, Any] | None = None,
    is_elastic: bool = True,
    ckpt_path: str | None = None,
    data: DataLoader[Any] | None = None,
    **options: Any,
) -> tuple[Lit, pl.Trainer]:
    logging.getLogger("vescale_fsdp").setLevel(logging.ERROR)
    chosen = {"directory": root / "run", "global_batch": GLOBAL_BATCH, "every": 2}
    chosen |= {"every_on_disk": None, "memory_directory": root / "memory", **(elastic or {})}
    made = ElasticOptions(**chosen)
    strategy = VeScaleFSDPStrategy(elastic=made) if is_elastic else VeScaleFSDPStrategy()
    trainer = make_trainer(strategy, root, **{"limit_val_batches": 0, **options})
    module = module or Lit()
    with contextlib.suppress(Stop):
        trainer.fit(module, data or loader(micro_batch), loader(8, 8), ckpt_path=ckpt_path)
    return module, trainer


def schedules(root: Path) -> None:
    rates = []
    for micro_batch in (4, 2, 1):  # 1, 2 and 4 micro-batches a step
        module, trainer = fit(root / str(micro_batch), micro_batch, Lit(frequency=4), max_steps=10)
        rates.append(module.rates)
        assert trainer.lr_scheduler_configs[0].frequency == 4, "the user's number"
    halved = [1.0] * 4 + [0.5] * 4 + [0.25] * 2
    assert rates == [dict(enumerate(halved))] * 3


def test_the_frequency_of_a_schedule_counts_optimizer_steps(tmp_path: Path) -> None:
    run_ranks(schedules, 1, tmp_path)


def validations(root: Path) -> None:
    for number, (limits, expected) in enumerate(
        {
            (0.5, 0.5): [4, 8],
            (4, 0.5): [2, 4],
            (100, 0.25): [4, 8, 12, 16],
            (1.0, 8): [8, 16],
            (6, 0.01): [1, 2, 3, 4, 5, 6],
            (5, 1.0): [5],
        }.items()
    ):
        names = ("limit_train_batches", "val_check_interval")
        options = {**dict(zip(names, limits, strict=True)), "limit_val_batches": 1, "max_epochs": 1}
        stock, _ = fit(root, GLOBAL_BATCH, is_elastic=False, **options)
        assert stock.validated == expected, limits
        own, trainer = fit(root / str(number), 1, **options)  # 4 micro-batches a step
        assert own.validated == expected, limits
        assert tuple(getattr(trainer, name) for name in names) == limits
    with pytest.raises(ValueError, match=r"val_check_interval=5\) counts optimizer steps .* has 4"):
        fit(root, 1, limit_train_batches=4, val_check_interval=5, limit_val_batches=1, max_epochs=1)


def test_validation_comes_after_the_same_steps_as_without_elastic_training(tmp_path: Path) -> None:
    run_ranks(validations, 1, tmp_path)


def samples_of(steps: range, global_batch: int = GLOBAL_BATCH, first: int = 0) -> dict[int, Any]:
    """The samples of these steps, of which the first begins with a sample."""
    starts = {step: first + number * global_batch for number, step in enumerate(steps)}
    return {
        step: [each % NUM_SAMPLES for each in range(start, start + global_batch)]
        for step, start in starts.items()
    }


class Saves(pl.Callback):
    """Saves a checkpoint after a number of batches."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)


def by_path(root: Path) -> None:
    """Checkpoints in the middle of the first epoch, loaded with other micro-batches."""
    savers = [Saves(root / "own", 10), Saves(root / "within", 13)]
    fit(root / "a", 2, Lit(7), elastic={"every_on_disk": 3}, callbacks=savers, max_epochs=2)
    (on_disk,) = (root / "a/run").glob("step-3-*")
    paths = {"to-own": root / "own", "to-within": root / "within", "to-disk": on_disk}
    for (name, path), first, micro_batch in zip(paths.items(), (5, 6, 3), (4, 4, 1), strict=True):
        expected = samples_of(range(first, 32), GLOBAL_BATCH, first * GLOBAL_BATCH)
        # Interrupted once more, in the second epoch.
        options: dict[str, Any] = {"ckpt_path": str(path), "max_epochs": 2}
        part, _ = fit(root / name, micro_batch, Lit(21), **options)
        assert part.seen == {step: expected[step] for step in range(first, 21)}, name
        rest, trainer = fit(root / name, 2, **options)
        assert rest.seen == {step: expected[step] for step in range(20, 32)}, name
        assert (trainer.global_step, trainer.current_epoch) == (32, 2)
    _, trainer = fit(root / "b", 2, max_steps=3, elastic={"global_batch": 8})  # ends its epoch
    trainer.save_checkpoint(root / "after")
    after, _ = fit(root / "after-4", 1, ckpt_path=str(root / "after"), max_epochs=2)
    assert after.seen == samples_of(range(3, 19), GLOBAL_BATCH, 3 * 8)


def test_a_checkpoint_may_have_another_number_of_micro_batches(tmp_path: Path) -> None:
    run_ranks(by_path, 1, tmp_path)


def of_stock(root: Path) -> None:
    for number, (accumulate, batches) in enumerate(((2, 6), (3, 19))):
        # 16 batches an epoch: 8 steps of 2 each, or 5 steps of 3 and one of 1.
        saver = Saves(root / f"stock-{number}", batches)
        options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "callbacks": [saver]}
        fit(root, 4, is_elastic=False, max_steps=9, **options)
    half, _ = fit(root / "half", 1, ckpt_path=str(root / "stock-0"), max_epochs=1)
    assert half.seen == samples_of(range(3, 16), GLOBAL_BATCH, 3 * GLOBAL_BATCH)
    with pytest.raises(ValueError, match=r"stock-1 has made 19 batches in 7 steps"):
        fit(root / "not", 1, ckpt_path=str(root / "stock-1"), max_epochs=2)
    _, trainer = fit(root, 4, is_elastic=False, max_epochs=1, accumulate_grad_batches=3)
    trainer.save_checkpoint(root / "stock-2")
    end, _ = fit(root / "end", 1, ckpt_path=str(root / "stock-2"), max_epochs=2)
    assert end.seen == samples_of(range(6, 22), GLOBAL_BATCH, 6 * GLOBAL_BATCH)


def other_global_batches(root: Path) -> None:
    options = {"elastic": {"global_batch": 4}}
    first, _ = fit(root, 4, max_steps=3, **options)
    assert first.seen == samples_of(range(3))
    options = {"elastic": {"global_batch": 8}}
    second, _ = fit(root, 4, Lit(6), max_steps=20, **options)
    assert second.seen == samples_of(range(3, 6), 8, 12)
    # Of the epoch's steps, 3 were made, which are 3 * 4 // 8 = 1 of the second kind, and 3 more:
    # 4 * 8 // 6 = 5 of the third kind. So 5 are left of 64 // 6 = 10.
    options = {"elastic": {"global_batch": 6}, "val_check_interval": 5, "limit_val_batches": 1}
    third, trainer = fit(root, 2, max_epochs=3, **options)
    assert third.seen == samples_of(range(6, 6 + 5 + 10), 6, 36)
    assert third.validated == [6 + 5, 6 + 10, 6 + 15]
    assert trainer.current_epoch == 3


def test_another_global_batch_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    run_ranks(other_global_batches, 1, tmp_path)


def test_checkpoints_of_other_trainings_are_loaded(tmp_path: Path) -> None:
    run_ranks(of_stock, 1, tmp_path)


class Noise(TensorDataset):
    """Draws a random number for each sample."""

    def __getitem__(self, index: int) -> Any:
        return torch.randn(WIDTH), index


class Noisy(Lit):
    """Draws random numbers before a batch is transferred, and while training."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__(stop_at)
        self.noise: dict[int, list[float]] = {}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn(WIDTH), batch[1]]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        found = self.noise.setdefault(self.global_step, [])
        found += [float(batch[0].sum()), float(torch.rand(()))]
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.rand(())


def augmented(root: Path) -> None:
    def go(name: str, stop_at: int | None = None, **elastic: Any) -> dict[int, list[float]]:
        data = DataLoader(Noise(torch.arange(NUM_SAMPLES)), 2)
        torch.manual_seed(5)
        options = {"max_steps": 20, "data": data}
        module, _ = fit(root / name, 2, Noisy(stop_at), elastic=elastic, **options)
        return module.noise

    quiet = go("quiet")
    assert go("more saves", every=1, every_on_disk=3) == quiet
    assert go("memory", 5) == {step: quiet[step] for step in range(5)}
    # Step 16 begins an epoch.
    assert go("memory", 16) == {step: quiet[step] for step in range(4, 16)}
    assert go("memory") == {step: quiet[step] for step in range(16, 20)}


def test_a_batch_loaded_again_has_the_same_random_numbers(tmp_path: Path) -> None:
    run_ranks(augmented, 1, tmp_path)


def ended_early(root: Path) -> None:
    logging.getLogger("vescale_fsdp_lightning").setLevel(logging.ERROR)

    def go(name: str, stop_at: int | None = None, **options: Any) -> tuple[int, int]:
        stopper = pl.callbacks.EarlyStopping("val_loss", patience=2)
        chosen = {"max_epochs": 20, "limit_train_batches": 3, "limit_val_batches": 1}
        chosen |= {"callbacks": [stopper], **options}
        module, trainer = fit(root / name, 2, Lit(stop_at), **chosen)
        return trainer.global_step, len(module.seen)

    assert go("a") == (9, 9)  # after epochs 2 and 3 the loss has grown
    assert go("a") == go("a") == (9, 0)
    assert go("a", max_epochs=21) == (12, 3)  # it may go on, and the callback stops it again
    assert go("a", max_epochs=21) == (12, 0)
    assert go("a", max_epochs=21, min_epochs=7) == (21, 9)
    # The callback has decided after 12 steps.
    assert go("b", min_steps=14, limit_train_batches=4) == (14, 14)
    assert go("c", 13, min_steps=14, limit_train_batches=4) == (13, 13)
    assert go("c", min_steps=14, limit_train_batches=4) == (14, 2)


def test_a_training_that_a_callback_has_ended_stays_so(tmp_path: Path) -> None:
    run_ranks(ended_early, 1, tmp_path)
