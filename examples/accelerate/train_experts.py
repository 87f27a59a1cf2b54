"""Train a small Mixtral on four processes: attention tensor parallel, experts spread.

    accelerate launch --config examples/accelerate/experts.yaml examples/accelerate/train_experts.py

The script has no code for any of that: ``experts.yaml`` asks for it.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import MixtralConfig, MixtralForCausalLM


def make_model() -> MixtralForCausalLM:
    """A Mixtral with 2 layers of 4 experts."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    return MixtralForCausalLM(config)


def make_data(sentences: int = 256) -> TensorDataset:
    """Sentences that count up, each with its own start and step."""
    generator = torch.Generator().manual_seed(1)
    start, step = torch.randint(1, 64, (2, sentences, 1), generator=generator)
    return TensorDataset((start + step * torch.arange(32)) % 256)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", default="runs/experts")
    args = parser.parse_args()
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(make_data(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    while step < args.steps:
        for (tokens,) in loader:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:
                mean = accelerator.gather(loss.detach().view(1)).mean().item()
                accelerator.print(f"step {step}: loss {mean:.4f}")
            if step == args.steps:
                break
    accelerator.save_state(args.save)
    accelerator.print(f"saved {args.save}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
