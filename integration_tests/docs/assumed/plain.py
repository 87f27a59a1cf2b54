"""A model that nobody has sharded yet, and what a training script has beside one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from vescale_fsdp import FSDPModule

    class Module(nn.Module, FSDPModule):
        """What ``fully_shard`` makes of a module."""
else:
    Module = nn.Module


class Block(Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y


MyTransformer = Net


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


torch.manual_seed(0)
model = Net()
block = Block()
optimizer: Any = AdamW(model.parameters())
inputs = x = torch.randn(16, 64)
targets = torch.zeros(16, 8)
micro_batches = [(inputs, targets)]
data = TensorDataset(inputs, targets)
loader = DataLoader(data, batch_size=2)
lr = 1e-3

# Of blocks that are checked and do not run.
folder: Path
