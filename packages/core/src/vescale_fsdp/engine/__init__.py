"""The engine: ``fully_shard`` and what happens around each forward and backward.

`api` makes a `unit` of a module; a unit owns `group` s (one buffer each, or one parameter that
gathers itself: `extension`) and has a `boundary` in the autograd graph; the units of a model share
a `schedule`. `agreement` compares ranks through the store, `usage` tells which parameters got a
gradient, `comms` makes communicators, `granularity` says what must not be cut, `blocks` finds
units, `tree` finds tensors, `clip` clips, `finite` looks for NaN, `methods` are FSDP2's.
"""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from vescale_fsdp.engine.api import fully_shard
from vescale_fsdp.engine.blocks import repeated_blocks
from vescale_fsdp.engine.clip import clip_grad_norm_
from vescale_fsdp.engine.finite import check_gradients
from vescale_fsdp.engine.granularity import Granularity, GranularityPolicy, combine
from vescale_fsdp.engine.hooks import register_fsdp_forward_method
from vescale_fsdp.engine.methods import FSDPModule, UnshardHandle, unsharded
from vescale_fsdp.engine.pipelining import share_comm_ctx

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "Granularity",
    "GranularityPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "check_gradients",
    "clip_grad_norm_",
    "combine",
    "fully_shard",
    "register_fsdp_forward_method",
    "repeated_blocks",
    "share_comm_ctx",
    "unsharded",
]
