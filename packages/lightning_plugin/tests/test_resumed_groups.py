"""Checkpoints whose optimizers have more groups than those that are made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning

from vescale_fsdp import CheckpointMismatchError
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import VeScaleFSDPStrategy

from .lit import LitModel, loader, make_model, make_trainer

FORMATS = ("sharded", "full", "dcp")


class TwoGroups(LitModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [
            {"params": [self.embedding.weight], "lr": 1e-3},
            {"params": [*self.blocks.parameters(), *self.norm.parameters()]},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)


class OneGroup(LitModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.blocks.parameters(), lr=1e-2)


def lose_a_group(root: Path) -> None:
    for kind in FORMATS:
        path = root / f"{kind}.ckpt"
        strategy = VeScaleFSDPStrategy(state_dict_type=kind)
        trainer = make_trainer(strategy, root, max_steps=2)
        trainer.fit(make_model(TwoGroups), loader(), loader())
        trainer.save_checkpoint(path)
        again = make_trainer(VeScaleFSDPStrategy(), root, max_steps=3)
        with pytest.raises(CheckpointMismatchError):
            again.fit(make_model(OneGroup), loader(), loader(), ckpt_path=path)


def test_states_of_a_group_are_not_dropped_in_silence(tmp_path: Path) -> None:
    run_ranks(lose_a_group, 2, tmp_path)


class Finetuned(LitModel):
    """Its backbone is trained from the second epoch on, in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.blocks
        del self.blocks
        self.blocks: Any = self.backbone  # forward has this name for it

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)


def finetune(root: Path, kind: str, epochs: int, resumed: Path | None = None) -> Any:
    trainer = make_trainer(
        VeScaleFSDPStrategy(state_dict_type=kind),
        root,
        max_epochs=epochs,
        max_steps=-1,
        limit_train_batches=2,
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3)],
    )
    module = make_model(Finetuned)
    trainer.fit(module, loader(), loader(), ckpt_path=resumed)
    return trainer, module


def states(trainer: Any, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    names = {id(param): name for name, param in module.named_parameters()}
    return {
        names[id(param)]: state["exp_avg"].full_tensor()
        for param, state in trainer.optimizers[0].state.items()
    }


def resume_finetuning(root: Path) -> None:
    for kind in FORMATS:
        path = root / f"{kind}-finetuned.ckpt"
        trainer, module = finetune(root, kind, 2)
        assert len(trainer.optimizers[0].param_groups) == 2
        trainer.save_checkpoint(path)
        again, resumed = finetune(root, kind, 2, path)
        assert len(again.optimizers[0].param_groups) == 2
        expected, found = states(trainer, module), states(again, resumed)
        assert any(name.startswith("backbone") for name in expected)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), (kind, name)
        again, _ = finetune(root, kind, 3, path)  # and goes on
        assert again.global_step == 6


def test_finetuning_resumes_after_its_backbone_has_joined(tmp_path: Path) -> None:
    run_ranks(resume_finetuning, 2, tmp_path)
