"""Models for the tests of budgets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, LENGTH, BATCH = 64, 32, 16, 4


class Block(nn.Module):
    """Has dropout and the statistics of a BatchNorm, and returns a dict."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        normed = self.norm(x.flatten(0, 1)).view_as(x)
        return {"x": x + scale * self.drop(self.down(F.gelu(self.up(normed))))}


class LM(nn.Module):
    """The head is tied to the embedding. Forward takes keywords and returns a loss."""

    def __init__(self, num_blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.ones(1)  # neither parameter nor buffer

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, scale=self.scale)["x"]
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())}


class Asking(LM):
    """Its forward needs values."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if labels.sum() < 0:
            raise ValueError("no labels")
        return super().forward(ids, labels)


class Positions(LM):
    """Makes tensors on the CPU in its forward, wherever it is."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(ids.shape[1])
        return super().forward((ids + positions) % VOCAB, labels[:, positions])


class Caching(nn.Module):
    """Blocks append to a list that the model makes in each forward."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, cache: list[Any]) -> Tensor:
            cache.append(x)
            return self.linear(torch.cat(cache).sum(0, keepdim=True).expand_as(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, [])
        return x


def batch(seed: int = 0) -> dict[str, Tensor]:
    """The arguments of one forward of `LM`."""
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids}
