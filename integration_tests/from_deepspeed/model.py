"""What both engines train: a small model, two groups of parameters, the same batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Sizes that no number of ranks divides; tied weights, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.up = nn.Linear(8, 11)
        self.norm = nn.LayerNorm(11)
        self.down = nn.Linear(11, 8, bias=False)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.down(torch.tanh(self.norm(self.up(self.embed(tokens))))))
        logits: Tensor = self.head(x * self.scale.to(x.dtype))
        return logits


def make_model() -> Net:
    torch.manual_seed(0)
    return Net()


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(13, (4,), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float(), tokens)
