"""Pre-training, then another model with a part of the trained one, in one script."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vescale_fsdp import FSDPModule, unsharded
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import VeScaleFSDPStrategy

from .lit import VOCABULARY, WIDTH, LitModel, full_parameters, loader, make_model
from .lit import make_trainer as make


class Pretrained(LitModel):
    """A backbone, which the head is tied to."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(self.embedding, *self.blocks, self.norm)
        del self.embedding, self.blocks, self.norm

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(tokens))


Make = Callable[["Pretrained", str], Any]


def taken(former: Pretrained, part: nn.Module, way: str) -> Any:
    if way == "itself":
        return part
    with unsharded(former) if way == "plain copy" else nullcontext():
        return copy.deepcopy(part)


class Finetuned(Pretrained):
    def __init__(self, former: Pretrained, way: str) -> None:
        super().__init__()
        self.backbone = taken(former, former.backbone, way)
        self.head = nn.Linear(WIDTH, VOCABULARY)


class Configured(Pretrained):
    """Takes the part when the strategy of its own training is there."""

    def __init__(self, former: Pretrained, way: str) -> None:
        super().__init__()
        self.take: Any = lambda: taken(former, former.backbone, way)

    def configure_model(self) -> None:
        if self.take is not None:
            torch.manual_seed(3)
            self.backbone, self.take = self.take(), None
            self.head = nn.Linear(WIDTH, VOCABULARY)


def again(former: Pretrained, way: str) -> Pretrained:
    model: Pretrained = taken(former, former, way)
    model.losses = []
    return model


class Distilled(LitModel):
    """A student, which has blocks too, with a frozen teacher."""

    def __init__(self, former: Pretrained, way: str) -> None:
        super().__init__()
        self.teacher = taken(former, former, way).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = self.teacher(tokens)
        return super().forward(tokens) + taught


def train(strategy: Any, root: Path, model: LitModel) -> None:
    make(strategy, root, max_steps=4, limit_val_batches=1).fit(model, loader(), loader())


def trained_twice(
    root: Path, kind: Make, way: str, *strategies: Any
) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    warnings.filterwarnings("ignore", "Find|The '.*dataloader' does not have many workers")
    former = make_model(Pretrained)
    train(strategies[0], root, former)
    model: Any = kind(former, way)
    train(strategies[-1], root, model)
    units = [name for name, each in model.named_modules() if isinstance(each, FSDPModule)]
    return model.losses, full_parameters(model), units


def compare(root: Path, kind: Make, way: str) -> list[str]:
    expected_losses, expected, _ = trained_twice(root, kind, way, "ddp")
    losses, params, units = trained_twice(root, kind, way, "vescale_fsdp")
    assert losses == expected_losses
    for name, param in expected.items():
        assert torch.equal(params[name], param), name
    return units


@pytest.mark.parametrize("way", ["itself", "copy", "plain copy"])
@pytest.mark.parametrize("kind", [Finetuned, Distilled, Configured, again])
def test_a_part_of_a_trained_model_trains_in_another_as_with_ddp(
    tmp_path: Path, kind: Make, way: str
) -> None:
    units, _ = run_ranks(compare, 2, tmp_path, kind, way)
    assert units
    if kind is Distilled and way == "itself":
        assert {"blocks.0", "teacher", "teacher.backbone.1"} <= set(units)


def transfer_other_units(root: Path) -> None:
    """The second strategy would make units of what belongs to the first one's."""
    losses, *_ = trained_twice(
        root, Finetuned, "itself", VeScaleFSDPStrategy(wrap="none"), VeScaleFSDPStrategy()
    )
    assert losses == trained_twice(root, Finetuned, "itself", "ddp")[0]


def test_the_second_strategy_may_wrap_other_modules(tmp_path: Path) -> None:
    run_ranks(transfer_other_units, 2, tmp_path)
