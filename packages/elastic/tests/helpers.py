"""A small model and its loop, on any number of ranks and hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import vescale_fsdp_elastic as elastic
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint.saving import finish_saves
from vescale_fsdp_elastic.run import Run

GLOBAL_BATCH, WIDTH = 12, 6


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """100 samples that depend on their index only."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator)
        return x, x.sin().sum().reshape(1)


class Stop(Exception):
    """What ends an attempt."""


def make(
    hidden: int = 16, dropout: float = 0.0
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    middle = nn.Sequential(nn.Tanh(), nn.Dropout(dropout))
    model = nn.Sequential(
        nn.Linear(WIDTH, hidden), middle, nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
    )
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    return model, optimizer, schedule


Losses = dict[int, float]


def train(
    root: Path,
    until: int,
    *,
    stop_at: int | None = None,
    ranks_per_host: int = 2,
    hosts: list[str] | None = None,
    before: Callable[[Run, int], None] | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Losses, str, int]:
    """Train to step ``until``, or raise `Stop` inside of the loop before step ``stop_at``.

    Returns the losses by step, where the state was from, and the attempt.
    """
    model, optimizer, schedule = make(dropout=dropout)
    host = dist.get_rank() // ranks_per_host if dist.is_initialized() else 0
    name = hosts[host] if hosts is not None else f"host{host}"
    losses: Losses = {}
    options = {"every": 2, "every_on_disk": None, "signals": (), **options}
    try:
        with elastic.training(
            root / "run",
            model,
            optimizer,
            stateful={"schedule": schedule},
            memory_directory=root / name,
            **options,
        ) as run:
            source, attempt = run.source, run.attempt
            for step in run.batches(
                Numbers(), global_batch=GLOBAL_BATCH, micro_batch=3, until=until
            ):
                if step.number == stop_at:
                    run._keeper.finish()
                    finish_saves()()
                    raise Stop
                if before is not None:
                    before(run, step.number)
                for x, y in step:
                    step.backward(nn.functional.mse_loss(model(x), y))
                losses[step.number] = step.mean_loss()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    except Stop:
        pass
    return losses, source, attempt
