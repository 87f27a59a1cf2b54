"""How the tests of Lightning's clients train: two ranks, one Trainer, its logs and weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .helpers import Steps, read_csv


def make_trainer(pl: Any, strategy: str, root: Path, **options: Any) -> Any:
    """Make a Trainer inside a rank, which logs each step; of either of Lightning's packages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(size)}
    logger = pl.loggers.CSVLogger(root / strategy, name="")
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=size, logger=logger, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        num_sanity_val_steps=0, **options,
    )  # fmt: skip


def logged(strategy: str, root: Path, *columns: str) -> Steps:
    """Read what the Trainer has logged."""
    return read_csv(root / strategy / "version_0" / "metrics.csv", columns)


def whole_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gather every parameter; all ranks call it."""
    return {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
        for name, param in model.named_parameters()
    }
