"""Optimizers for sharded parameters, built on the public engine.

`AdamW8bit`, `Muon`, `Shampoo` and `SOAP` are ordinary ``torch.optim.Optimizer`` s with the numbers
of one process on any number of ranks. `OptimizerGroup` makes several into one object, and
`split_named_params` makes the usual split for matrix optimizers. `flatten_` lets an element-wise
optimizer of ``torch.optim`` step once per group on the contiguous shard.

`base` is what ours share, `cuts` finds parameters that are parts of shards. Each optimizer is in a
file or folder of its name (`adamw8bit`, `muon`, `preconditioned`), on top of `quantized` (8-bit
blocks), `matrices` (whole matrices on owners) or `flat` (pieces of shards).
"""

from vescale_fsdp.optim.adamw8bit import AdamW8bit
from vescale_fsdp.optim.flat.flatten import flatten_
from vescale_fsdp.optim.group import OptimizerGroup
from vescale_fsdp.optim.matrices.assignment import CommunicationPlan
from vescale_fsdp.optim.muon.muon import Muon
from vescale_fsdp.optim.preconditioned.shampoo import Shampoo
from vescale_fsdp.optim.preconditioned.soap import SOAP
from vescale_fsdp.optim.split import split_named_params

__all__ = [
    "SOAP",
    "AdamW8bit",
    "CommunicationPlan",
    "Muon",
    "OptimizerGroup",
    "Shampoo",
    "flatten_",
    "split_named_params",
]
