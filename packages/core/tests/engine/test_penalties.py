"""Penalties on sharded parameters, added to a loss: as in one process.

The sum is a DTensor, so gradients of plain activations are DTensors, too (`ragged.whole`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import full_gradients
from .models import make

PENALTIES: dict[str, Callable[[Any], Any]] = {
    "squares": lambda model: 0.01 * sum(p.square().sum() for p in model.parameters()),
    "norm": lambda model: 0.1 * torch.stack([p.norm() for p in model.parameters()]).norm(),
    "largest": lambda model: 0.1 * model.blocks[0].linear.weight.abs().max(),
    "spectral": lambda model: 0.1 * torch.linalg.matrix_norm(model.blocks[0].linear.weight, 2),
    "orthogonal": lambda model: (
        (model.blocks[1].linear.weight.T @ model.blocks[1].linear.weight).square().sum()
    ),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.heads(y, y, y, need_weights=False)[0]
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + F.gelu(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def check(options: dict[str, Any]) -> None:
    batches = [torch.arange(12).view(2, 6) % 11, torch.arange(3, 15).view(2, 6) % 7]
    for name, penalty in PENALTIES.items():
        model, plain = make(Model), make(Model)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, **options)
        fully_shard(model, **options)
        for batch in batches:
            ((plain(batch) + penalty(plain)) / 2).backward()
        loss = model(batches[dist.get_rank()]) + penalty(model)
        loss.backward()
        for key, gradient in full_gradients(model).items():
            wanted = plain.get_parameter(key).grad
            torch.testing.assert_close(
                gradient, wanted, msg=lambda m, n=name, k=key: f"{n}, {k}: {m}"
            )


@pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": False}, {"sharding": "zero1"}, {"sharding": "ddp"}]
)
@pytest.mark.sampled(2)
def test_they_have_the_gradients_of_one_process(options: dict[str, Any]) -> None:
    run_ranks(check, 2, options)
