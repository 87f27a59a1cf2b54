"""Train on two processes, and give the weights to an inference engine as they become better.

    torchrun --standalone --nproc-per-node 2 examples/stream_weights.py

As in reinforcement learning: the trainer holds the model sharded, in fp32; the engine (here a plain
GPT in bf16 in the first process, in real life vLLM or SGLang) holds it whole. Every 20 steps the
weights go from one to the other, a bucket at a time. No process ever holds the whole model in fp32.
"""

import argparse

import torch
import torch.distributed as dist
from gpt import GPT, generate, load_text
from train_gpt import PROMPT, batch_of, make_model, make_optimizer, say, train_step

from vescale_fsdp import stream_parameters


class Engine:
    """Stands for an inference engine: it takes tensors by name, one after the other."""

    def __init__(self, vocabulary_size: int, layers: int, width: int) -> None:
        self.model = GPT(vocabulary_size, layers=layers, width=width).bfloat16()
        self.weights = dict(self.model.named_parameters())

    @torch.no_grad()
    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take over one tensor."""
        self.weights[name].copy_(tensor)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Stream weights from training to an engine.")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between two transfers")
    parser.add_argument("--batch-size", type=int, default=8, help="of all processes together")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train as one of the processes that torchrun has started."""
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dist.init_process_group("gloo")
    vocabulary, data, _ = load_text()
    model = make_model(len(vocabulary.tokens), args)
    optimizer = make_optimizer(model)
    engine = None
    if dist.get_rank() == 0:
        engine = Engine(len(vocabulary.tokens), args.layers, args.width)
    for step in range(args.max_steps):
        loss = train_step(model, optimizer, batch_of(step, data, args), 1e-3)
        if (step + 1) % args.every:
            continue
        # All processes iterate; the first one gets the tensors, the others None.
        for name, tensor in stream_parameters(model, dtype=torch.bfloat16, to=0):
            if engine is not None and tensor is not None:
                engine.load(name, tensor)
        say(f"step {step + 1}  loss {loss.item():.3f}  the engine has new weights and writes:")
        if engine is not None:
            prompt = vocabulary.encode(PROMPT).long()
            print(vocabulary.decode(generate(engine.model, prompt, num_tokens=40)), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
