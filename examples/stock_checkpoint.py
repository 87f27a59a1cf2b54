"""Save with PyTorch's own functions in the background, and go on with other processes or FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/stock_checkpoint.py --max-steps 10
    torchrun --standalone --nproc-per-node 4 examples/stock_checkpoint.py --max-steps 20
    torchrun --standalone --nproc-per-node 2 examples/stock_checkpoint.py --max-steps 30 --fsdp2

Nothing in it but ``fully_shard`` is of veScale-FSDP, and ``--fsdp2`` takes PyTorch's. The files are
the same, so each command goes on where the one before it has stopped.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, load_text
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from train_gpt import batch_of, make_optimizer, say, train_step, validate

from vescale_fsdp import fully_shard


def make_model(vocabulary_size: int, args: argparse.Namespace) -> GPT:
    """A model that one of the two engines has sharded."""
    shard: Any = stock_fully_shard if args.fsdp2 else fully_shard
    model = GPT(vocabulary_size, layers=args.layers, width=args.width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        shard(block, mesh=mesh)
    shard(model, mesh=mesh)
    return model


def state_of(model: GPT, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint has: sharded tensors and plain values, by names. Nothing is gathered."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def main() -> None:
    """Train as one of the processes that torchrun has started."""
    parser = argparse.ArgumentParser(description="Checkpoints of torch.distributed.checkpoint.")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--fsdp2", action="store_true", help="PyTorch's fully_shard")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/stock_checkpoint"))
    parser.add_argument("--batch-size", type=int, default=8, help="of all processes together")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dist.init_process_group("gloo")
    savers = dist.new_group(backend="gloo")  # the training uses the other one at the same time
    vocabulary, data, val_data = load_text()
    model = make_model(len(vocabulary.tokens), args)
    optimizer = make_optimizer(model)

    step, saving = 0, None
    done = [each.parent for each in args.out.glob("step-*/.metadata")]  # written last
    if done:
        last = max(done, key=lambda each: int(each.name.removeprefix("step-")))
        state = state_of(model, optimizer, step)
        dcp.load(state, checkpoint_id=last)  # into the shards
        step, trained, states = state["step"], state["model"], state["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=trained, optim_state_dict=states)
        say(f"resumed from {last}; validation loss: {validate(model, val_data):.4f}")

    while step < args.max_steps:
        train_step(model, optimizer, batch_of(step, data, args), 1e-3)
        step += 1
        if step % args.save_every == 0 or step == args.max_steps:
            if saving is not None:
                saving.result()  # the last one; raises its error
            path = args.out / f"step-{step}"
            state = state_of(model, optimizer, step)
            saving = dcp.async_save(state, checkpoint_id=path, process_group=savers)  # copies them
            say(f"saving {path}; validation loss: {validate(model, val_data):.4f}")
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
