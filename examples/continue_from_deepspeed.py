"""Continue a training that DeepSpeed began, from its ZeRO-3 checkpoint.

    torchrun --standalone --nproc-per-node 2 examples/continue_from_deepspeed.py --deepspeed
    torchrun --standalone --nproc-per-node 4 examples/continue_from_deepspeed.py

The first command needs DeepSpeed: it trains some steps and saves. The second one does not: it
converts the checkpoint, loads weights and Adam's states on any number of processes, and goes on.
Both print the loss on the validation data at the checkpoint, which is the same.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, load_text, loss_of
from torch.optim import AdamW
from train_gpt import batch_of, make_model, say, train_step, validate

from vescale_fsdp import checkpoint


def train_with_deepspeed(args: argparse.Namespace) -> None:
    """Train with DeepSpeed, and save in its own format."""
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]

    deepspeed.init_distributed("gloo")
    vocabulary, data, val_data = load_text()
    model = GPT(len(vocabulary.tokens), layers=args.layers, width=args.width)
    config = {
        "train_batch_size": args.batch_size,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(args.steps):
        tokens, targets = batch_of(step, data, args)
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
    engine.save_checkpoint(args.deepspeed_folder, client_state={"step": args.steps})
    say(f"DeepSpeed has saved; validation loss {validate(engine, val_data):.4f}")


def continue_here(args: argparse.Namespace) -> None:
    """Convert DeepSpeed's checkpoint once, load it, and go on."""
    dist.init_process_group("gloo")
    vocabulary, data, val_data = load_text()
    model = make_model(len(vocabulary.tokens), args)
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), foreach=True)
    if dist.get_rank() == 0 and not Path(args.folder).exists():
        checkpoint.convert(args.deepspeed_folder, args.folder, to="vescale")
    dist.barrier()
    first = checkpoint.load(args.folder, model, optimizer)["step"]
    say(f"continued from step {first}; validation loss {validate(model, val_data):.4f}")
    for step in range(first, first + args.steps):
        train_step(model, optimizer, batch_of(step, data, args), 1e-3)
    say(f"after {args.steps} more steps; validation loss {validate(model, val_data):.4f}")


def main() -> None:
    """Run as one of the processes that torchrun has started."""
    parser = argparse.ArgumentParser(description="Continue a training that DeepSpeed began.")
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed-folder", default="checkpoints/deepspeed")
    parser.add_argument("--folder", default="checkpoints/from_deepspeed", help="the converted one")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8, help="of all processes together")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    (train_with_deepspeed if args.deepspeed else continue_here)(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
