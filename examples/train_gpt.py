"""Train a small GPT on two CPU processes in plain PyTorch, fully sharded by veScale-FSDP.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

It learns Python's standard library for a minute, saves a checkpoint on the way, resumes from it
with a new model, and writes some Python of its own.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Data, generate, learning_rate_factor, load_text, loss_of
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from vescale_fsdp import checkpoint, clip_grad_norm_, fully_shard, unsharded

PROMPT = b"\n\nclass Reader:\n    def __init__(self"
EPOCHS = 3  # of max_steps / 3 steps each; the last one is trained after resuming


def make_model(vocabulary_size: int) -> GPT:
    """A sharded model."""
    model = GPT(vocabulary_size)
    # Each call makes a unit: parameters that are gathered together, just before they are used.
    # Inner modules first; the last call takes what is left (embeddings, norm, head).
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def make_optimizer(model: GPT) -> Optimizer:
    """Made after sharding: from there on, the parameters are this process' shards."""
    return AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), foreach=True)


def loader(data: Data, batch_size: int, epoch: int, shuffle: bool) -> DataLoader[list[Tensor]]:
    """This process' part of the data, in an order that depends on the epoch."""
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(data, shuffle=shuffle)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size, sampler=sampler, drop_last=shuffle)


def train_epoch(
    model: GPT, optimizer: Optimizer, data: Data, epoch: int, args: argparse.Namespace
) -> None:
    """An ordinary training loop; the hooks on the model gather and reduce."""
    num_steps = args.max_steps // EPOCHS
    steps = range(epoch * num_steps, (epoch + 1) * num_steps)
    started = time.perf_counter()
    batches = loader(data, args.batch_size, epoch, shuffle=True)
    for step, (tokens, targets) in zip(steps, batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * learning_rate_factor(step, args.max_steps)
        loss = loss_of(model(tokens), targets)
        loss.backward()  # leaves the mean over the processes in the gradients
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps[-1]:
            num_tokens = (step - steps[0] + 1) * tokens.numel() * dist.get_world_size()
            speed = num_tokens / (time.perf_counter() - started)
            say(f"step {step:4d}  loss {loss.item():.3f}  {speed:6.0f} tokens/s")


@torch.no_grad()
def validate(model: GPT, data: Data) -> float:
    """The mean loss over the validation data, the same number on all processes."""
    losses = [
        loss_of(model(tokens), targets) for tokens, targets in loader(data, 32, 0, shuffle=False)
    ]
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def say(text: str) -> None:
    """Print on the first process only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(
    args: argparse.Namespace, make_optimizer: Callable[[GPT], Optimizer] = make_optimizer
) -> None:
    """Train, save, resume, generate."""
    torch.manual_seed(args.seed)  # the same weights on all processes
    vocabulary, train_data, val_data = load_text()
    model = make_model(len(vocabulary.tokens))
    optimizer = make_optimizer(model)
    say(f"validation loss before: {validate(model, val_data):.3f}")
    for epoch in range(EPOCHS - 1):
        train_epoch(model, optimizer, train_data, epoch, args)
        say(f"validation loss: {validate(model, val_data):.3f}")

    # `save` never overwrites: each run (torchrun gives it an id) has a folder of its own.
    path = Path(args.out) / os.environ["TORCHELASTIC_RUN_ID"] / f"epoch-{EPOCHS - 1}"
    checkpoint.save(path, model, optimizer, extra={"next_epoch": EPOCHS - 1})

    # A new model with new random weights: everything that matters comes from the checkpoint.
    model = make_model(len(vocabulary.tokens))
    optimizer = make_optimizer(model)
    extra = checkpoint.load(path, model, optimizer)
    say(f"resumed from {path}; validation loss: {validate(model, val_data):.3f}")
    for epoch in range(extra["next_epoch"], EPOCHS):
        train_epoch(model, optimizer, train_data, epoch, args)
        say(f"validation loss: {validate(model, val_data):.3f}")

    with unsharded(model):  # whole parameters for 100 forward passes, gathered once
        say(vocabulary.decode(generate(model, vocabulary.encode(PROMPT).long(), num_tokens=100)))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT in plain PyTorch, sharded.")
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=4, help="per process, of 64 tokens each")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="checkpoints", help="folder for the checkpoint")
    return parser.parse_args(arguments)


def main(
    arguments: list[str] | None = None, make_optimizer: Callable[[GPT], Optimizer] = make_optimizer
) -> None:
    """Train as one of the processes that torchrun has started."""
    args = parse_args(arguments)
    torch.set_num_threads(1)  # the processes share the cores
    dist.init_process_group("gloo")
    try:
        train(args, make_optimizer)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
