"""Train a small GPT on two CPU processes in plain PyTorch, fully sharded by veScale-FSDP.

    torchrun --standalone --max-restarts 3 --nproc-per-node 2 examples/train_gpt.py

It trains for a minute on the sources of Python's standard library, and then generates some Python.
If you kill a process, torchrun starts all of them again, and they continue from the last
checkpoint. They also continue if you start the command again, with any number of processes. With
the same number, the digest of the final weights is that of a run without interruption.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Data, digest_of, generate, learning_rate_factor, load_text, loss_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, default_collate

from vescale_fsdp import checkpoint, clip_grad_norm_, fully_shard, unsharded

PROMPT = b"\n\nclass Reader:\n    def __init__(self"


def make_model(vocabulary_size: int, args: argparse.Namespace) -> GPT:
    """A sharded model."""
    model = GPT(vocabulary_size, layers=args.layers, width=args.width)
    # Each call makes a unit: parameters that are unsharded together, before they are used. Inner
    # modules come first; the last call takes all other parameters (embeddings, norm, head).
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_optimizer(model: GPT) -> Optimizer:
    """Make the optimizer. Call it after sharding, when the parameters are shards."""
    return AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), foreach=True)


def batch_of(step: int, data: Data, args: argparse.Namespace) -> list[Tensor]:
    """Return this process' part of a batch: tokens and targets, (batch / processes, time) each.

    It depends only on the step, and not on earlier batches. So training can be resumed at any step,
    with any number of processes.
    """
    epoch, number = divmod(step, len(data) // args.batch_size)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(args.seed + epoch))
    chosen = order[number * args.batch_size :][: args.batch_size]
    mine = chosen[dist.get_rank() :: dist.get_world_size()]
    return default_collate([data[i] for i in mine.tolist()])


def train_step(
    model: GPT, optimizer: Optimizer, batch: list[Tensor], learning_rate: float
) -> Tensor:
    """An ordinary step. Hooks of the model unshard and reduce. Returns this process' loss."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    tokens, targets = batch
    loss = loss_of(model(tokens), targets)
    loss.backward()  # gradients are then the mean over the processes
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def validate(model: GPT, data: Data) -> float:
    """Return the mean loss over the validation data, the same on all processes."""
    mine = range(dist.get_rank(), len(data), dist.get_world_size())
    # With a separate generator, because the loader draws a random number.
    batches = DataLoader(data, 32, sampler=mine, generator=torch.Generator())
    losses = [loss_of(model(tokens), targets) for tokens, targets in batches]
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
    """Train from the last checkpoint or from the start, then generate."""
    torch.manual_seed(args.seed)  # the same weights on all processes
    vocabulary, train_data, val_data = load_text()
    model = make_model(len(vocabulary.tokens), args)
    optimizer = make_optimizer(model)
    step, last = 0, checkpoint.latest(args.out)
    if last is not None:  # weights, optimizer and random number generators
        step = checkpoint.load(last, model, optimizer)["step"]
    start = f"resumed from {last}; validation loss" if last else "validation loss before"
    say(f"{start}: {validate(model, val_data):.3f}")

    with checkpoint.StopOnSignal() as stop:
        while step < args.max_steps:
            started = time.perf_counter()
            learning_rate = args.learning_rate * learning_rate_factor(step, args.max_steps)
            batch = batch_of(step, train_data, args)
            loss = train_step(model, optimizer, batch, learning_rate)
            step += 1
            if step % 10 == 0:
                speed = args.batch_size * model.context / (time.perf_counter() - started)
                say(f"step {step:4d}  loss {loss.item():.3f}  {speed:6.0f} tokens/s")
            stopping = stop.requested()  # after SIGTERM to any process: all stop here
            if stopping or step % args.save_every == 0 or step == args.max_steps:
                path = Path(args.out) / f"step-{step}"
                checkpoint.save(path, model, optimizer, extra={"step": step}, keep_last=2)
                say(f"saved {path}; validation loss: {validate(model, val_data):.3f}")
            if stopping:
                sys.exit(stop.exit_code)

    with unsharded(model):  # unsharded once for 100 forward passes
        say(vocabulary.decode(generate(model, vocabulary.encode(PROMPT).long(), num_tokens=100)))
        say(f"digest: {digest_of(model)}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT in plain PyTorch, sharded.")
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument(
        "--batch-size", type=int, default=8, help="sequences of all processes together"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    default = f"checkpoints/{Path(sys.argv[0]).stem}"
    parser.add_argument(
        "--out", default=default, help="folder of this run; delete it to start over"
    )
    return parser.parse_args(arguments)


def main(
    arguments: list[str] | None = None, make_optimizer: Callable[[GPT], Optimizer] = make_optimizer
) -> None:
    """Train as one of the processes that torchrun starts."""
    args = parse_args(arguments)
    torch.set_num_threads(1)  # the processes share the cores
    checkpoint.init_process_group("gloo")  # as torch's, but also works after a restart
    try:
        if args.batch_size % dist.get_world_size():
            raise SystemExit("--batch-size must be a multiple of the number of processes")
        train(args, make_optimizer)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
