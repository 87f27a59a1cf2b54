"""See where the time of a training step goes, on two processes.

    torchrun --standalone --nproc-per-node 2 examples/profile_step.py

Rank 0 prints a table of the units and one line of advice. Each process writes a trace into
``profile_step/``; open it in https://ui.perfetto.dev. The ranges of veScale-FSDP are called
``vescale::unshard(blocks.3)`` and so on.
"""

import argparse

import torch
import torch.distributed as dist
from gpt import load_text
from train_gpt import batch_of, make_model, make_optimizer, train_step

from vescale_fsdp import profile


def main() -> None:
    """Train some steps as one of the processes that torchrun has started."""
    parser = argparse.ArgumentParser(description="Profile training steps.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", default="profile_step")
    parser.add_argument("--batch-size", type=int, default=8, help="of all processes together")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dist.init_process_group("gloo")
    vocabulary, data, _ = load_text()
    model = make_model(len(vocabulary.tokens), args)
    optimizer = make_optimizer(model)
    step = 0
    with profile(model, args.folder, steps=args.steps, warmup=3) as profiler:
        while True:
            train_step(model, optimizer, batch_of(step, data, args), 1e-3)
            step += 1
            if profiler.step():
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
