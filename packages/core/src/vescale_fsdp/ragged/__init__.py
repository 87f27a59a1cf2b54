"""RaggedShard and RaggedTensor: shards in whole blocks, expressed as a DTensor placement.

One file per concept. Layouts: `placement` (which rank holds which units), `regions` (a flat range
as boxes), `holdings` (boxes for any mix of placements), `recuts` (after a change of shape),
`blocks` (of a tensor that is quantized, and where they lie).
Moving data: `exchange`, `redistribute`, `pending`. The tensor: `tensor` (the DTensor subclass),
`assignment` (of ``.data``), `saving`. Operators: `dispatch` (which run, and what comes out),
`elementwise`, `mixing`, `linear`, `views`, `reductions` with `aggregates` and `norms`, `random`,
`scaling`, `gradients`.
"""

from vescale_fsdp.ragged import dispatch as dispatch  # gives RaggedTensor its operators
from vescale_fsdp.ragged.placement import RaggedShard
from vescale_fsdp.ragged.reductions import max_over_ranks
from vescale_fsdp.ragged.regions import Box, contiguous_strides, flat_range_to_boxes
from vescale_fsdp.ragged.saving import allow_loading
from vescale_fsdp.ragged.tensor import RaggedTensor

__all__ = [
    "Box",
    "RaggedShard",
    "RaggedTensor",
    "contiguous_strides",
    "flat_range_to_boxes",
    "max_over_ranks",
]

allow_loading()
