"""A GAN, as users write one: manual optimization with an optimizer for each loss."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Layers that are no repeated blocks, so that they stay with the module around them."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, width)
        self.down = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Gan(pl.LightningModule):
    """Calls its networks directly, also right after a backward and after a step.

    It uses a parameter of its own then, too, as the temperature of soft actor-critic.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Net(4, 8, 6)
        self.discriminator = Net(6, 8, 1)
        self.log_weight = nn.Parameter(torch.tensor(0.1))
        self.losses: list[float] = []

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def bce(self, samples: Tensor, is_real: bool) -> Tensor:
        target = torch.full((len(samples), 1), float(is_real))
        return binary_cross_entropy_with_logits(self.discriminator(samples), target)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        noise = real[:, :4] * 0.5
        first, second, third = self.optimizers()
        self.toggle_optimizer(first)
        loss_of_generator = self.bce(self(noise), True)
        self.manual_backward(loss_of_generator)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        real_loss = self.bce(real, True)  # the discriminator's, before the generator runs again
        fake = self.generator(noise).detach()  # with the weights of after the step
        loss_of_discriminator = real_loss + self.log_weight.exp().detach() * self.bce(fake, False)
        self.manual_backward(loss_of_discriminator)
        self.clip_gradients(second, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

        self.toggle_optimizer(third)
        self.manual_backward(self.log_weight * (0.5 - self.bce(real, True).detach()))
        third.step()
        third.zero_grad()
        self.untoggle_optimizer(third)
        self.losses += [loss_of_generator.item(), loss_of_discriminator.item()]

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-2),
            torch.optim.Adam([self.log_weight], lr=1e-2),
        ]


def make_gan() -> Gan:
    torch.manual_seed(3)
    return Gan()


def gan_loader() -> DataLoader[Any]:
    samples = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(samples), batch_size=4)
