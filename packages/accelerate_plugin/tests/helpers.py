"""Accelerators inside the ranks of ``run_ranks``, models and data for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vescale_fsdp_accelerate import VeScaleAccelerator
from vescale_fsdp_accelerate._autoload import replace_trainers

replace_trainers()  # as in a worker of `accelerate launch`; before they are imported


@contextmanager
def accelerator(cls: type[Accelerator] = VeScaleAccelerator, **options: Any) -> Iterator[Any]:
    """An accelerator on CPU as in a process of ``accelerate launch``; no trace afterwards."""
    before = dict(os.environ)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    try:
        yield cls(**options)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


class Model(nn.Module):
    """Tied, in blocks, with a buffer and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x) * self.scale  # type: ignore[no-any-return]


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def make_loader(batches: int = 6, size: int = 4) -> DataLoader[Any]:
    """Batches of all processes together: as many of each process."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(16, (batches * size * dist.get_world_size(), 5), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=size)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, sharded or not."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
