"""Train as fast as a budget of memory allows: settings are chosen, written, and used again.

    torchrun --standalone --nproc-per-node 2 examples/within_budget.py --budget 60MB
    torchrun --standalone --nproc-per-node 2 examples/within_budget.py --budget choice.yaml

The first call measures and prints the candidates; the second uses what the first has written. The
loss is the same with both, and nearly so with each budget.
"""

import argparse

import torch
import torch.distributed as dist
from gpt import GPT, load_text, loss_of
from torch.distributed.device_mesh import init_device_mesh
from train_gpt import batch_of, make_optimizer, train_step

from vescale_fsdp_tune import Budget, fully_shard, tuning_of


def make_model(vocabulary_size: int, batch: list[torch.Tensor], args: argparse.Namespace) -> GPT:
    """A model whose units and settings are chosen for the memory that there is."""
    model = GPT(vocabulary_size, layers=args.layers, width=args.width)
    inputs, targets = batch
    budget = Budget(memory=args.budget)
    if budget.path is None:
        budget = Budget(
            memory=args.budget,
            inputs=inputs,
            loss=lambda logits: loss_of(logits, targets),
            save_to="choice.yaml",
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, budget=budget)
    return model


def main() -> None:
    """Train some steps as one of the processes that torchrun has started."""
    parser = argparse.ArgumentParser(description="Train within a budget of memory.")
    parser.add_argument("--budget", default="auto", help="10GiB, 80%%, auto, or choice.yaml")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="of all processes together")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dist.init_process_group("gloo")
    vocabulary, data, _ = load_text()
    model = make_model(len(vocabulary.tokens), batch_of(0, data, args), args)
    optimizer = make_optimizer(model)
    for step in range(args.steps):
        loss = train_step(model, optimizer, batch_of(step, data, args), 1e-3)
    if dist.get_rank() == 0:
        tuning = tuning_of(model)
        sharding = "as written" if tuning is None else tuning.chosen.candidate.sharding
        print(f"loss {loss.item():.6f}, sharding {sharding}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
