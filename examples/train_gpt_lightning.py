"""Train a small GPT on two CPU processes with Lightning, fully sharded by veScale-FSDP.

    python examples/train_gpt_lightning.py

It trains for a minute on the sources of Python's standard library, saves a checkpoint, resumes from
it in a new Trainer, and generates some Python. ``strategy="vescale_fsdp"`` is all that is needed
for sharding. No import is needed if the package is installed with Lightning.
"""

import argparse
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from gpt import GPT, generate, learning_rate_factor, load_text, loss_of
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

PROMPT = b"\n\nclass Reader:\n    def __init__(self"
EPOCHS = 3  # of max_steps / 3 steps each; the last one is trained after resuming

for advice in (  # for bigger machines, odd sizes of data, other folders
    ".*does not have many workers",
    "Using `DistributedSampler` with the dataloaders",
    "Checkpoint directory .* exists and is not empty",
):
    warnings.filterwarnings("ignore", advice)


class GPTModule(pl.LightningModule):
    """An ordinary LightningModule. Only `predict_step` has code for sharding."""

    def __init__(self, vocabulary_size: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.gpt = GPT(vocabulary_size, layers=args.layers, width=args.width)
        self.max_steps, self.learning_rate = args.max_steps, args.learning_rate

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = loss_of(self(tokens), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        tokens, targets = batch
        loss = loss_of(self(tokens), targets)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def predict_step(self, prompt: Tensor, batch_idx: int) -> Tensor:
        # Only to be faster: without it, each of the 100 forward passes would unshard all
        # parameters. So the import is here.
        from vescale_fsdp import unsharded

        with unsharded(self):
            return generate(self.gpt, prompt[0], num_tokens=100)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), foreach=True
        )

    def configure_optimizers(self) -> dict[str, Any]:
        # Called after the model was sharded, so the optimizer gets this process' shards.
        optimizer = self.make_optimizer()
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, self.max_steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def make_trainer(
    args: argparse.Namespace, max_epochs: int, callbacks: list[Callback]
) -> pl.Trainer:
    """A Trainer on `args.devices` CPU processes. Lightning starts the processes itself."""
    return pl.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices,
        precision=args.precision,
        max_epochs=max_epochs,
        limit_train_batches=max(1, args.max_steps // EPOCHS),
        gradient_clip_val=args.clip_norm or None,
        callbacks=callbacks,
        logger=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )


def train(args: argparse.Namespace, module: type[GPTModule] = GPTModule) -> None:
    """Train, save, resume, generate."""
    pl.seed_everything(args.seed)  # the same weights on all processes
    vocabulary, train_data, val_data = load_text()
    # Lightning gives each process its own part of the data.
    train_loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_data, batch_size=32)
    checkpoint = ModelCheckpoint(dirpath=args.out, filename="{epoch}", enable_version_counter=False)
    callbacks: list[Callback] = [checkpoint]
    if args.metrics:
        from metrics import Metrics

        callbacks.append(Metrics(args.metrics, tokens_per_batch=args.batch_size * 64))

    model = module(len(vocabulary.tokens), args)
    trainer = make_trainer(args, EPOCHS - 1, callbacks)
    trainer.validate(model, val_loader)  # untrained: worse than a uniform guess, ln 2048 = 7.6
    trainer.fit(model, train_loader, val_loader)

    # A new Trainer and new random weights; the checkpoint replaces them.
    trainer.print(f"resuming from {checkpoint.best_model_path}")
    model = module(len(vocabulary.tokens), args)
    trainer = make_trainer(args, EPOCHS, callbacks)
    trainer.fit(model, train_loader, val_loader, ckpt_path=checkpoint.best_model_path)

    if not args.no_generate:
        prompts = [vocabulary.encode(PROMPT).long()] * args.devices  # one for each process
        continued = trainer.predict(model, DataLoader(prompts))
        trainer.print(vocabulary.decode(continued[0]))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with Lightning, sharded.")
    parser.add_argument("--strategy", default="vescale_fsdp")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--precision", default="32-true", help="or bf16-mixed, bf16-true")
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument(
        "--batch-size", type=int, default=4, help="sequences of 64 tokens per process"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument(
        "--clip-norm", type=float, default=1.0, help="limit of the gradient norm; 0: off"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="checkpoints", help="folder for checkpoints")
    parser.add_argument("--metrics", help="write losses, speed and memory to this JSON file")
    parser.add_argument("--no-generate", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None, module: type[GPTModule] = GPTModule) -> None:
    """Train in this process and in those that Lightning starts."""
    torch.set_num_threads(1)  # the processes share the cores
    train(parse_args(arguments), module)


if __name__ == "__main__":
    main()
