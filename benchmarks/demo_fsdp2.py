"""The Lightning example with PyTorch's FSDP2, with which the demo compares.

Model, data, seed, steps and script are the same. The differences are Lightning's strategy for
FSDP2, and `configure_model`, in which this strategy requires that the user shards the model.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch.distributed.fsdp import FSDPModule, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from train_gpt_lightning import GPTModule, parse_args, train


class FSDP2Module(GPTModule):
    """The example's module with the units that our strategy makes: each block, and the rest."""

    def configure_model(self) -> None:
        """Lightning calls this for each of validate and fit."""
        if isinstance(self.gpt, FSDPModule):
            return
        for block in self.gpt.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.gpt, mesh=self.device_mesh["data_parallel"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    args = parse_args()
    StrategyRegistry.register(
        "fsdp2", ModelParallelStrategy, data_parallel_size=args.devices, tensor_parallel_size=1
    )
    args.strategy, args.no_generate = "fsdp2", True
    try:
        train(args, FSDP2Module)
    finally:
        if dist.is_initialized():  # Lightning does not, and gloo may abort at exit
            dist.destroy_process_group()
