"""Train a small GPT with Accelerate. It has no code for veScale-FSDP.

    accelerate launch --config examples/accelerate/vescale.yaml examples/accelerate/train.py

Add ``--resume runs/state`` to continue from a checkpoint.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel


def make_model() -> nn.Module:
    """A GPT-2 with 4 layers and its embedding tied to its head."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4,
        n_head=4,
        n_embd=128,
        vocab_size=256,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def make_data(sentences: int = 512) -> TensorDataset:
    """Sentences that count up, each with its own start and step."""
    generator = torch.Generator().manual_seed(1)
    start, step = torch.randint(1, 64, (2, sentences, 1), generator=generator)
    return TensorDataset((start + step * torch.arange(32)) % 256)


def main() -> None:
    """Train and save, or continue from a checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save", default="runs/state")
    parser.add_argument("--resume")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.resume:
        accelerator.load_state(args.resume)

    for epoch in range(args.epochs):
        for (tokens,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        mean = accelerator.gather(loss.detach().view(1)).mean().item()
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")
    accelerator.save_state(args.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
