"""lightly's BYOL, the LightningModule of its examples on a small backbone, beside DDP."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale_fsdp.testing import run_ranks

from .helpers import check
from .lightning_run import logged, make_trainer, whole_parameters

# isort: split
import pytorch_lightning as pl  # after the helpers, which let torchvision be imported
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule


class BYOL(pl.LightningModule):  # type: ignore[misc]
    """As examples/pytorch_lightning/byol.py, with three layers in place of the ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.projection_head = BYOLProjectionHead(8, 16, 4)
        self.prediction_head = BYOLPredictionHead(4, 16, 4)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.backbone(x).flatten(start_dim=1)
        return self.prediction_head(self.projection_head(y))  # type: ignore[no-any-return]

    def forward_momentum(self, x: torch.Tensor) -> torch.Tensor:
        y = self.backbone_momentum(x).flatten(start_dim=1)
        return self.projection_head_momentum(y).detach()  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x0, x1 = batch
        p0, z0, p1, z1 = self(x0), self.forward_momentum(x0), self(x1), self.forward_momentum(x1)
        loss: torch.Tensor = 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.06)


def fit(strategy: str, root: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = BYOL()
    views = torch.randn(2, 32, 3, 8, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*views), batch_size=4)
    make_trainer(pl, strategy, root, max_epochs=2).fit(model, loader)
    return whole_parameters(model)


def test_byol_trains_as_under_ddp(tmp_path: Path) -> None:
    found, expected = (
        run_ranks(fit, 2, strategy, tmp_path)[0] for strategy in ("vescale_fsdp", "ddp")
    )
    check(logged("vescale_fsdp", tmp_path, "loss"), logged("ddp", tmp_path, "loss"), rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
