"""What a script with Lightning or Fabric has."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from assumed.plain import Net, loss_of, x

__all__ = ["Fabric", "LitModel", "Trainer", "loss_of", "model", "torch", "x"]


class LitModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()


model = Net()
accumulating = False

# Of blocks that are checked and do not run.
fabric: Fabric
loss: Tensor
optimizer: torch.optim.Optimizer
