"""RaggedShard and RaggedTensor: shards in whole blocks, expressed as a DTensor placement.

One file per concept. Layouts: `placement` (which rank holds which units), `holdings` (boxes for any
mix of placements), `recuts` (after a change of shape), `blocks` (of a quantized tensor, and
their places). Moving data: `moves`. Tensors: `base` (what all have in common), `tensor` (the ragged
one, and the functions that make it), `replicated` (whole on every rank).
Operators: `dispatch` (the table: which run, and what comes out), `operands` (what each argument is
on this rank), `gradients` (their layout); then one file for each kind: `pointwise`, `reductions`,
`views`, `random`, `gathered`, `collectives`; `whole` for tensors that are not sharded. `access` is
what schemas say of memory, and who wants to hear of writes.
"""

from vescale_fsdp.ragged import dispatch as dispatch  # gives RaggedTensor its operators
from vescale_fsdp.ragged.access import access_of, hear_of_writes
from vescale_fsdp.ragged.base import NAME, OPERANDS
from vescale_fsdp.ragged.blocks import Blocks, BlockSize, CutBlockError, Region
from vescale_fsdp.ragged.holdings import (
    Box,
    boxes_of,
    contiguous_strides,
    holding_of,
    ragged_axis_of,
    remaining_box,
)
from vescale_fsdp.ragged.moves import PendingTensor, as_bytes, group_along
from vescale_fsdp.ragged.placement import RaggedShard
from vescale_fsdp.ragged.recuts import spec_of
from vescale_fsdp.ragged.reductions import max_over_ranks
from vescale_fsdp.ragged.replicated import ReplicatedTensor, wrap_replicated
from vescale_fsdp.ragged.tensor import (
    RaggedTensor,
    distribute_tensor,
    from_local,
    make_spec,
    parameter_cut_into,
    redistribute,
    wrap,
    wrap_local,
)

__all__ = [
    "NAME",
    "OPERANDS",
    "BlockSize",
    "Blocks",
    "Box",
    "CutBlockError",
    "PendingTensor",
    "RaggedShard",
    "RaggedTensor",
    "Region",
    "ReplicatedTensor",
    "access_of",
    "as_bytes",
    "boxes_of",
    "contiguous_strides",
    "distribute_tensor",
    "from_local",
    "group_along",
    "hear_of_writes",
    "holding_of",
    "make_spec",
    "max_over_ranks",
    "parameter_cut_into",
    "ragged_axis_of",
    "redistribute",
    "remaining_box",
    "spec_of",
    "wrap",
    "wrap_local",
    "wrap_replicated",
]
