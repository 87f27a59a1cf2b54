"""Parameters where no unit of theirs runs: penalties, norms of gradients, layers called alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm as stock_grad_norm
from torch.distributed.tensor import DTensor

from vescale_fsdp import unsharded
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import grad_norm

from .lit import WIDTH, LitModel, assert_equal, fit, full_parameters, make_model


class Descends(LitModel):
    """AdamW would make large steps of the last bit of a gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Penalized(Descends):
    """An L2 penalty over all parameters, as for DDP, and as `docs/lightning.md` has it."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(param.square().sum() for param in self.parameters())


class PenalizedWhole(Descends):
    """The same, with whole numbers: then the loss is plain."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        sums = [param.square().sum() for param in self.parameters()]
        return loss + 0.01 * sum(x.full_tensor() if isinstance(x, DTensor) else x for x in sums)


def penalty(root: Path) -> None:
    expected = fit("ddp", root, make_model(Penalized))
    assert expected[0] != fit("ddp", root, make_model(Descends))[0]
    assert_equal(fit("vescale_fsdp", root, make_model(PenalizedWhole)), expected, atol=1e-5)
    assert_equal(fit("vescale_fsdp", root, make_model(Penalized)), expected, atol=1e-5)


class Norms(LitModel):
    """Logs what Lightning's function finds under DDP, and ours under both."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        if self.trainer.strategy.strategy_name != "vescale_fsdp":
            assert norms == pytest.approx(stock_grad_norm(self, norm_type=2))
        self.log_dict(norms)
        self.norms.append({name: float(norm) for name, norm in norms.items()})


def norms(root: Path) -> None:
    found = []
    for strategy in ("ddp", "vescale_fsdp"):
        model = make_model(Norms)
        fit(strategy, root, model)
        found.append(model.norms)
    assert len(found[0]) == 6
    for expected, ours in zip(*found, strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
        assert "grad_2.0_norm/blocks.0.up.weight" in ours
        assert "grad_2.0_norm_total" in ours
    largest = grad_norm(model, "inf", group_separator=".")
    assert largest.keys() == {"grad_inf_norm_total"} | {
        f"grad_inf_norm.{name}"
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def layers(root: Path) -> None:
    model = make_model()
    fit("vescale_fsdp", root, model)
    whole = make_model()
    whole.load_state_dict(
        {**full_parameters(model), "head.weight": model.head.weight.full_tensor()}
    )
    x = torch.ones(2, WIDTH)
    for layer in ("head", "norm", "blocks.0.up"):
        with pytest.raises(NotImplementedError, match=r"with vescale_fsdp\.unsharded\(model\)"):
            model.get_submodule(layer)(x)
        with torch.no_grad(), unsharded(model):
            found = model.get_submodule(layer)(x)
        assert torch.equal(found, whole.get_submodule(layer)(x))
    assert torch.equal(model.blocks[0](x), whole.blocks[0](x))  # a unit


def outside(root: Path) -> None:
    penalty(root)
    norms(root)
    layers(root)


def test_penalties_norms_of_gradients_and_layers_called_alone(tmp_path: Path) -> None:
    run_ranks(outside, 2, tmp_path, timeout_s=100)
