"""The training step with DeepSpeed's ZeRO, on CPU over gloo.

DeepSpeed has no units. ZeRO-3 gathers the parameters of each layer, prefetches up to the size of a
bucket, and reduces gradients in buckets. Its sizes are in elements, and the defaults are for models
with billions of parameters; a small model would never be resharded. `settings` scales them to the
model's blocks, so that each block is gathered twice, as with the other engines. `VARIANTS` has the
other settings that were tried; benchmarks/README.md compares them.

Stages 1 and 2 have the same scaled buckets for gradients and for updated parameters. They do not
compute the norm of the gradients, because no other engine here does. In fp32 they keep a second
copy of the parameters that a rank updates.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.engines import Training
from benchmarks.models import Batches
from torch import Tensor, nn

__all__ = ["VARIANTS", "ZeroTraining", "settings"]

LEAST_BUCKET = 500_000  # elements
LEAVES = "leaves"  # not a setting: whether each block is gathered as a whole, as the others do

# What differs from `settings`, by the number of elements of a block.
VARIANTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "deepspeed": lambda block: {},
    "deepspeed-one-block": lambda block: {
        "reduce_bucket_size": block,
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * block,
    },
    "deepspeed-large": lambda block: {
        "reduce_bucket_size": 20 * block,
        "stage3_prefetch_bucket_size": 20 * block,
    },
    "deepspeed-kept": lambda block: {
        "stage3_max_live_parameters": 1_000_000_000,  # the defaults
        "stage3_max_reuse_distance": 1_000_000_000,
    },
    "deepspeed-modules": lambda block: {LEAVES: False},
    "deepspeed-linear": lambda block: {"memory_efficient_linear": True},  # the default
    "deepspeed-no-overlap": lambda block: {"overlap_comm": False},
    "deepspeed-persistent": lambda block: {"stage3_param_persistence_threshold": 10_000},
    "deepspeed-1": lambda block: {"stage": 1, "compute_grad_norm": False},
    "deepspeed-2": lambda block: {"stage": 2, "compute_grad_norm": False},
    "deepspeed-1-large": lambda block: {
        "stage": 1, "compute_grad_norm": False, "reduce_bucket_size": 20 * block
    },
    "deepspeed-1-no-overlap": lambda block: {
        "stage": 1, "compute_grad_norm": False, "overlap_comm": False
    },
    "deepspeed-2-large": lambda block: {
        "stage": 2, "compute_grad_norm": False, "reduce_bucket_size": 20 * block
    },
    "deepspeed-2-no-overlap": lambda block: {
        "stage": 2, "compute_grad_norm": False, "overlap_comm": False
    },
}  # fmt: skip


def settings(block: int, precision: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration for blocks of that many elements."""
    bucket = max(4 * block, LEAST_BUCKET)
    return {
        "train_micro_batch_size_per_gpu": 1,  # it only counts with it
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # the default of DeepSpeed 0.19 is 1.0
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "memory_efficient_linear": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": bucket + block,
            "stage3_max_reuse_distance": block,
            "stage3_param_persistence_threshold": 0,
            **changes,
        },
    }


class ZeroTraining(Training):
    """A model with one of `VARIANTS`."""

    def __init__(self, name: str, model: nn.Module, precision: str, batches: Batches) -> None:
        dtype = torch.bfloat16 if precision == "bf16" else None
        super().__init__(model, list(model.parameters()), batches, input_dtype=dtype)
        deepspeed = _adopt_process_group()
        blocks: Any = model.blocks
        block = sum(param.numel() for param in blocks[0].parameters())
        changes = VARIANTS[name](block)
        # DeepSpeed 0.19.8 fails on a Sequential of norms as a leaf.
        is_sharded = changes.get("stage", 3) == 3
        if changes.pop(LEAVES, is_sharded and type(blocks[0]) is not nn.Sequential):
            deepspeed.utils.set_z3_leaf_modules(model, [type(blocks[0])])
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.optimizer,
            config=settings(block, precision, changes),
            dist_init_required=False,
        )
        self.model = self.engine

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()


def _adopt_process_group() -> Any:
    """Return the module deepspeed, which uses the existing process group."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "DS_ACCELERATOR": "cpu"}
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    deepspeed = import_module("deepspeed")
    # It would compile an operator for inference in every process.
    backend: Any = import_module("deepspeed.comm.torch")  # the attribute is torch itself
    backend.build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", verbose=False, dist_init_required=False)
    return deepspeed
