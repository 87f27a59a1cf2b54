"""Train a small GPT on two CPU processes with Lightning Fabric, fully sharded by veScale-FSDP.

    python examples/train_fabric.py

The user writes the training loop. Two things are for sharding: the name of the strategy, and
``setup_module`` is called before the optimizer is made.
"""

import argparse
import warnings
from pathlib import Path

import torch
from gpt import GPT, load_text, loss_of
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", ".*does not have many workers")


def main() -> None:
    """Train, save, and continue from the checkpoint."""
    parser = argparse.ArgumentParser(description="Train a small GPT with Fabric, sharded.")
    parser.add_argument("--strategy", default="vescale_fsdp")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--precision", default="32-true", help="or bf16-mixed, bf16-true")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--out", type=Path, default=Path("checkpoints") / "fabric")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the processes share the cores
    fabric = Fabric(
        strategy=args.strategy, accelerator="cpu", devices=args.devices, precision=args.precision
    )
    fabric.launch()
    fabric.seed_everything(0)
    vocabulary, data, _ = load_text()
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True, drop_last=True))

    with fabric.init_module(empty_init=False):
        model = GPT(len(vocabulary.tokens))
    model = fabric.setup_module(model)  # before the optimizer: this shards the parameters
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    batches = iter(loader)
    for half in range(2):
        while state["step"] < (half + 1) * args.max_steps // 2:
            for micro in range(args.accumulate):
                tokens, targets = next(batches)
                is_last = micro + 1 == args.accumulate
                with fabric.no_backward_sync(model, enabled=not is_last):
                    loss = loss_of(model(tokens), targets)
                    fabric.backward(loss / args.accumulate)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            if state["step"] % 10 == 0 or state["step"] == 1:
                fabric.print(f"step {state['step']:4d}  loss {loss.item():.3f}")
        fabric.save(args.out, state)
        fabric.load(args.out, state)
        fabric.print(f"saved and loaded {args.out} at step {state['step']}")


if __name__ == "__main__":
    main()
