"""Generate with a sharded transformers model on two processes, which stop at different lengths.

    torchrun --standalone --nproc-per-node 2 examples/generate_transformers.py

The model is a small Llama with random weights, made from a config: nothing is downloaded. Each
process has a prompt of its own and generates as many tokens as it likes. With
``--max-unsharded-bytes 0`` the model is never whole in memory.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from vescale_fsdp import fully_shard, generating


def main() -> None:
    """Generate as one of the processes that torchrun has started."""
    parser = argparse.ArgumentParser(description="Generate with a sharded transformers model.")
    parser.add_argument("--max-unsharded-bytes", type=int, help="default: half of the free memory")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    rank = dist.get_rank()
    prompt = torch.tensor([[1, 2 + rank, 3]])
    length = 5 + 20 * rank  # no process waits for a longer one, or has to know of it
    with generating(model, max_unsharded_bytes=args.max_unsharded_bytes):
        tokens = model.generate(prompt, max_new_tokens=length, do_sample=False)
    for each in range(dist.get_world_size()):
        if each == rank:
            print(f"process {rank} generated {tokens.shape[1] - 3} tokens", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
