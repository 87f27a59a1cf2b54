"""The model that the tests of this folder train, and how they train it inside of a rank."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, WIDTH = 23, 12


class Block(nn.Module):
    """A residual block with a norm, weights of two shapes and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LitModel(pl.LightningModule):
    """Next-token model with a tied embedding; the root owns it and the final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.losses: list[float] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batch
        logits = self(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def make_model(cls: type[LitModel] = LitModel) -> LitModel:
    """The same weights on every rank and in every run."""
    torch.manual_seed(7)
    return cls()


def loader() -> DataLoader[Any]:
    """64 sequences, of which Lightning's sampler gives each rank its part."""
    tokens = torch.randint(0, VOCABULARY, (64, 9), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens), batch_size=4)


def make_trainer(strategy: Any, root: str | Path, **options: Any) -> pl.Trainer:
    """A quiet Trainer in a rank that the test harness has started."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(size))
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": size,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": str(root),
        "num_sanity_val_steps": 0,
        "limit_val_batches": 2,
        "limit_test_batches": 2,
        "use_distributed_sampler": True,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole, whatever the strategy has made of it."""
    return {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
        for name, param in model.named_parameters()
    }


Run = tuple[list[float], dict[str, torch.Tensor]]


def fit(strategy: Any, root: Path, model: Any = None, **options: Any) -> Run:
    model = make_model() if model is None else model
    make_trainer(strategy, root, **{"max_steps": 6, **options}).fit(model, loader(), loader())
    return model.losses, full_parameters(model)


def assert_equal(run: Run, expected: Run, atol: float = 0.0) -> None:
    assert run[0] == pytest.approx(expected[0], rel=0, abs=atol)
    assert expected[0][-1] < expected[0][0]  # something was learned
    assert run[1].keys() == expected[1].keys()
    for name, param in expected[1].items():
        torch.testing.assert_close(run[1][name], param, rtol=0, atol=atol, msg=name)
