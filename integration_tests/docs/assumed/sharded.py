"""A model of ``transformers`` that is sharded, has done a step, and has the next one's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # noqa: F401
import transformers
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: F401

from vescale_fsdp import FSDPModule, fully_shard

if TYPE_CHECKING:
    from vescale_fsdp_accelerate import VeScaleAccelerator


class BadBatch(Exception):
    pass


class Llama(transformers.LlamaForCausalLM, FSDPModule):
    """What ``fully_shard`` makes of it, for those who check types."""


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randint(0, 64, (2, 8), generator=generator)


def train_step(model: Llama, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


torch.manual_seed(0)
rank = dist.get_rank()
config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
model: Llama = transformers.LlamaForCausalLM(config)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
train_step(model, optimizer, batch_of(0))
loss = model(input_ids=batch_of(1), labels=batch_of(1)).loss
step, max_steps = 0, 100
path = "out"
batch = {"input_ids": batch_of(2), "do_sample": False}
prompt = batch["input_ids"]


class Engine:
    def load_weights(self, weights: list[tuple[str, Tensor | None]]) -> None:
        pass


engine = Engine()

# Of blocks that are checked and do not run.
accelerator: VeScaleAccelerator
