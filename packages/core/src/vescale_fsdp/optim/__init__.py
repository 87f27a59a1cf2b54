"""Optimizers for sharded parameters, built on the public engine.

`AdamW8bit`, `Muon`, `Shampoo` and `SOAP` are ordinary ``torch.optim.Optimizer`` s with the numbers
of one process on any number of ranks. `OptimizerGroup` makes several into one object, and
`split_named_params` makes the usual split for matrix optimizers. `flatten_` lets an element-wise
optimizer of ``torch.optim`` step once per group on the contiguous shard.
"""

from vescale_fsdp.optim.adamw8bit import AdamW8bit
from vescale_fsdp.optim.assignment import CommunicationPlan
from vescale_fsdp.optim.flatten import flatten_
from vescale_fsdp.optim.muon import Muon
from vescale_fsdp.optim.several import OptimizerGroup
from vescale_fsdp.optim.shampoo import Shampoo
from vescale_fsdp.optim.soap import SOAP
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
