"""Optimizers for sharded parameters, built on the public engine.

`AdamW8bit`, `Muon`, `Shampoo` and `SOAP` are ordinary ``torch.optim.Optimizer`` s with the numbers
of one process on any number of ranks. `OptimizerGroup` makes several into one object, and
`split_named_params` makes the usual split for matrix optimizers. `flatten_` lets an element-wise
optimizer of ``torch.optim`` step once per group on the contiguous shard. `offload_` keeps an
optimizer's states in host memory.

The files:

* `base`: the base class of our optimizers
* `adamw8bit`, with `codes` (blocks of 8-bit numbers)
* `muon`, with `muon_rule` (its arithmetic)
* `shampoo` and `soap`, with `preconditioned` and `roots`
* to compute whole matrices on one rank each: `layout` (the matrices of a parameter, and the ranks
  that hold their elements), `owners` (which rank computes which matrix), `routes` (which rank sends
  what to which) and `transport` (sends it). All but the last use only integers.
* `flatten`, with `flat`
* `offload`
"""

from vescale_fsdp.optim.adamw8bit import AdamW8bit
from vescale_fsdp.optim.flatten import flatten_
from vescale_fsdp.optim.group import OptimizerGroup, split_named_params
from vescale_fsdp.optim.muon import Muon
from vescale_fsdp.optim.offload import offload_
from vescale_fsdp.optim.owners import CommunicationPlan
from vescale_fsdp.optim.shampoo import Shampoo
from vescale_fsdp.optim.soap import SOAP

__all__ = [
    "SOAP",
    "AdamW8bit",
    "CommunicationPlan",
    "Muon",
    "OptimizerGroup",
    "Shampoo",
    "flatten_",
    "offload_",
    "split_named_params",
]
