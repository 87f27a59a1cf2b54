"""DBuffer: one flat buffer per communication group, gathered and reduced in place.

`flat` is memory that comes and goes under fixed views, `buffer` the parameters of a group,
`gradients` their gradients, `collectives` moves both between ranks.
"""

from vescale_fsdp.dbuffer.buffer import DBuffer, shard_view
from vescale_fsdp.dbuffer.collectives import Comm, PendingReduce, choose_reduction
from vescale_fsdp.dbuffer.flat import FlatBuffer, plain_tensors
from vescale_fsdp.dbuffer.gradients import GradientBuffer

__all__ = [
    "Comm",
    "DBuffer",
    "FlatBuffer",
    "GradientBuffer",
    "PendingReduce",
    "choose_reduction",
    "plain_tensors",
    "shard_view",
]
