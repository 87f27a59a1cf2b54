"""Train a small GAN on two CPU processes with Lightning, fully sharded by veScale-FSDP.

    python examples/train_gan_lightning.py

There are two networks, two optimizers and manual optimization: the generator learns to put points
on a ring. The module is written as for one process. Each network is unsharded when it is called,
with the weights after the last step.
"""

import argparse
import math
import warnings

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

NOISE, WIDTH = 8, 64

warnings.filterwarnings("ignore", ".*does not have many workers")


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Three linear layers."""
    return nn.Sequential(
        nn.Linear(inputs, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, outputs),
    )


class GAN(pl.LightningModule):
    """An ordinary LightningModule with two optimizers. Nothing here is about sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = network(NOISE, 2)
        self.discriminator = network(2, 1)

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        noise = torch.randn(len(real), NOISE)
        for_generator, for_discriminator = self.optimizers()

        self.toggle_optimizer(for_generator)
        generator_loss = bce(self.discriminator(self(noise)), yes)
        self.manual_backward(generator_loss)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        fake = self(noise).detach()
        loss = bce(self.discriminator(real), yes) + bce(self.discriminator(fake), no)
        self.manual_backward(loss)
        self.clip_gradients(for_discriminator, 1.0, "norm")
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)
        self.log_dict({"generator": generator_loss, "discriminator": loss}, prog_bar=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        points = self(torch.randn(256, NOISE))
        distance = (points.norm(dim=1) - 1).abs().mean()
        self.log("distance_from_ring", distance, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(each.parameters(), lr=1e-3, betas=(0.5, 0.999))
            for each in (self.generator, self.discriminator)
        ]


def ring(num_points: int) -> TensorDataset:
    """Points on a circle of radius 1."""
    angles = torch.rand(num_points, 1) * 2 * math.pi
    return TensorDataset(torch.cat((angles.cos(), angles.sin()), dim=1))


def main() -> None:
    """Train in this process and in those that Lightning starts."""
    parser = argparse.ArgumentParser(description="Train a small GAN with Lightning, sharded.")
    parser.add_argument("--strategy", default="vescale_fsdp")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument(
        "--max-steps", type=int, default=2000, help="steps of both optimizers together"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # the processes share the cores
    pl.seed_everything(0)  # the same weights on all processes
    model = GAN()
    trainer = pl.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices,
        max_steps=args.max_steps,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    points = DataLoader(ring(16384), batch_size=64, shuffle=True, drop_last=True)
    validation = DataLoader(ring(64), batch_size=32)
    before = trainer.validate(model, validation, verbose=False)[0]["distance_from_ring"]
    trainer.fit(model, points, validation)
    after = trainer.validate(model, validation, verbose=False)[0]["distance_from_ring"]
    trainer.print(f"distance from the ring: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
