"""Train in less memory: recompute or move activations, and keep optimizer states on the host.

    torchrun --standalone --nproc-per-node 2 examples/save_memory.py --activations recompute

Prints the peak memory of the first process and the loss. The loss does not depend on the options.
On the CPU, which is the host, ``offload`` moves nothing; on an accelerator, activations and
optimizer states are then in pinned memory of the host.
"""

import argparse
import resource

import torch
import torch.distributed as dist
from gpt import GPT, load_text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from train_gpt import batch_of, make_optimizer, train_step

from vescale_fsdp import fully_shard
from vescale_fsdp.optim import offload_


def make_model(vocabulary_size: int, args: argparse.Namespace) -> GPT:
    """A sharded model whose blocks keep less for their backward than autograd would."""
    model = GPT(vocabulary_size, layers=args.layers, width=args.width)
    policy = OffloadPolicy()
    if args.offload in ("parameters", "all"):
        policy = CPUOffloadPolicy(pin_memory=False)  # on a GPU: True
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, activations=args.activations, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model


def main() -> None:
    """Train some steps as one of the processes that torchrun has started."""
    parser = argparse.ArgumentParser(description="Train in less memory.")
    parser.add_argument("--activations", choices=("recompute", "offload", "recompute+offload"))
    parser.add_argument("--offload", choices=("optimizer", "parameters", "all"))
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
    model = make_model(len(vocabulary.tokens), args)
    optimizer = make_optimizer(model)
    if args.offload is not None:
        offload_(optimizer, states=args.offload != "parameters")
    for step in range(args.steps):
        loss = train_step(model, optimizer, batch_of(step, data, args), 1e-3)
    if dist.get_rank() == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"loss {loss.item():.6f}, peak memory of the process {peak:.0f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
