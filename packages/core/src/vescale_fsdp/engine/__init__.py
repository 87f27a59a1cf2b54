"""The engine: ``fully_shard`` and what happens around each forward and backward.

Read in this order; each file is one concept.

- What is made: `api` (``fully_shard``), `arguments` (what it refuses), `ownership` (which
  parameters it takes), `placement`, `granularity` and `padding` (how they are cut), `zero_table`
  and `axes` (over which axes of the mesh), `parallel` (DTensors already), `ties`, `blocks`;
  `quantized` (what travels in 8 bits), by the `roles` of parameters.
- What lives: `unit` (around each forward), `group` (what comes and goes of one buffer) of
  `parameters` (where they rest) in `slot` s (one each), or `extension` (parameters that gather
  themselves, with their `outputs`), `inner_shard`; `hooks`, `calls` and `boundary` (how modules and
  autograd call), `tree`, `root`, `materialized`; `buffers` (of a root, before forwards); `copies`.
- What is sent, and when: `vescale_fsdp.program` decides (a floor of its own), `engine` carries it
  out and owns what changes; `mail` (small all-gathers together), `reducing` (of a backward),
  `reduce` (a group's gradients) with `residuals`, `usage` and `publishing`; `comms`, `lanes`.
- What keeps ranks together: `attempts` (a store of their own), `rounds` along a `merge_tree`,
  `agreement`, `settling`, `meeting`, `fingerprint`.
- What users call: `methods`, `tuning`, `pipelining`, `clip`, `finite`; `adjacent` and `steps` help.
"""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from vescale_fsdp.engine.agreement import LONG_TIMEOUT_S
from vescale_fsdp.engine.api import fully_shard
from vescale_fsdp.engine.attempts import init_process_group, store_for
from vescale_fsdp.engine.blocks import repeated_blocks
from vescale_fsdp.engine.clip import clip_grad_norm_
from vescale_fsdp.engine.feedback import ErrorFeedback
from vescale_fsdp.engine.finite import check_gradients
from vescale_fsdp.engine.granularity import Granularity, GranularityPolicy, combine
from vescale_fsdp.engine.hooks import register_fsdp_forward_method
from vescale_fsdp.engine.methods import FSDPModule, UnshardHandle, unsharded
from vescale_fsdp.engine.pipelining import share_comm_ctx
from vescale_fsdp.engine.quantized import QuantizedGather, QuantizedReduce, checked_block, is_matrix
from vescale_fsdp.engine.quantized_weight import QuantizedWeight
from vescale_fsdp.engine.residuals import Residuals
from vescale_fsdp.engine.roles import HEADS, Roles, may_be_hidden
from vescale_fsdp.engine.unfilled import blank_tensors, mark_blank

__all__ = [
    "HEADS",
    "LONG_TIMEOUT_S",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "ErrorFeedback",
    "FSDPModule",
    "Granularity",
    "GranularityPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "QuantizedGather",
    "QuantizedReduce",
    "QuantizedWeight",
    "Residuals",
    "Roles",
    "UnshardHandle",
    "blank_tensors",
    "check_gradients",
    "checked_block",
    "clip_grad_norm_",
    "combine",
    "fully_shard",
    "init_process_group",
    "is_matrix",
    "mark_blank",
    "may_be_hidden",
    "register_fsdp_forward_method",
    "repeated_blocks",
    "share_comm_ctx",
    "store_for",
    "unsharded",
]
