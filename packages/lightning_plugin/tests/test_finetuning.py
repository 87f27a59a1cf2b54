"""Lightning's ``BaseFinetuning``: layers that are trained from a later epoch on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch.utils.data import DataLoader

from vescale_fsdp.testing import run_ranks

from .lit import LitModel, full_parameters, loader, make_model, make_trainer

DDP = "ddp_find_unused_parameters_true"


class Descends(LitModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Thaws(BaseFinetuning):
    """The first block is frozen in the first epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.blocks[0])

    def finetune_function(
        self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[0], optimizer, lr=0.1)


def finetuned(root: Path, strategy: Any, batch_size: int) -> dict[str, torch.Tensor]:
    warnings.filterwarnings("ignore", "The '.*dataloader' does not have many workers")
    model, options = make_model(Descends), {"max_epochs": 2, "max_steps": -1}
    trainer = make_trainer(strategy, root, callbacks=[Thaws()], limit_train_batches=6, **options)
    batches = DataLoader(loader().dataset, batch_size=batch_size)
    trainer.fit(model, batches, batches)
    assert len(trainer.optimizers[0].param_groups) == 2
    return full_parameters(model)


def by_one_process(root: Path) -> None:
    torch.save(finetuned(root, DDP, 8), root / "expected")


def by_two(root: Path) -> None:
    """Each has half of the batch: every second sample."""
    expected = torch.load(root / "expected", weights_only=True)
    start = make_model(Descends).state_dict()["blocks.0.up.weight"]
    assert (expected["blocks.0.up.weight"] - start).abs().max() > 1e-3  # it was trained
    found = {
        strategy: max((param - expected[name]).abs().max().item() for name, param in made.items())
        for strategy in ("vescale_fsdp", DDP)
        for made in (finetuned(root, strategy, 4),)
    }
    assert found["vescale_fsdp"] < 1e-6
    # What was frozen when DDP wrapped it is never reduced: each process trains its own.
    assert found[DDP] > 1e-3


def test_what_is_thawed_later_trains_as_in_one_process(tmp_path: Path) -> None:
    run_ranks(by_one_process, 1, tmp_path)
    run_ranks(by_two, 2, tmp_path)
