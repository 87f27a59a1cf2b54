"""A model that learns from a slower copy of itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from assumed.plain import Net


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Net(), Net()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.student(x) - self.teacher(x).detach()
        return y


model = Pair()
optimizer = torch.optim.AdamW(model.parameters())
momentum = 0.99
