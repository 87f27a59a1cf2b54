"""RaggedShard and RaggedTensor: shards in whole blocks, expressed as a DTensor placement.

One file per concept: `placement` (which rank holds which units), `regions` (a flat range as
boxes), `tensor` (the DTensor subclass), `dispatch` (which operators run on shards), `norms`.
"""

from vescale_fsdp.ragged.norms import max_over_ranks
from vescale_fsdp.ragged.placement import RaggedShard
from vescale_fsdp.ragged.regions import Box, contiguous_strides, flat_range_to_boxes
from vescale_fsdp.ragged.tensor import RaggedTensor

__all__ = [
    "Box",
    "RaggedShard",
    "RaggedTensor",
    "contiguous_strides",
    "flat_range_to_boxes",
    "max_over_ranks",
]
