"""Optimizers for sharded parameters, built on the public engine.

`AdamW8bit`, `Muon`, `Shampoo` and `SOAP` are ordinary ``torch.optim.Optimizer`` s with the numbers
of one process on any number of ranks. `OptimizerGroup` makes several into one object, and
`split_named_params` makes the usual split for matrix optimizers. `flatten_` lets an element-wise
optimizer of ``torch.optim`` step once per group on the contiguous shard.

`base` is what ours share. On it: `adamw8bit` with `codes` (blocks of 8 bits); `muon` with
`muon_rule` (its numbers); `shampoo` and `soap` on `preconditioned` with `roots`. Whole matrices go
to owners by `layout` (which matrices a parameter is made of, and who holds what of them), `owners`
(who computes which), `routes` (who sends what to whom) and `transport` (which sends it; all but it
are pure integers). `flatten` steps on the pieces of `flat`.
"""

from vescale_fsdp.optim.adamw8bit import AdamW8bit
from vescale_fsdp.optim.flatten import flatten_
from vescale_fsdp.optim.group import OptimizerGroup
from vescale_fsdp.optim.muon import Muon
from vescale_fsdp.optim.owners import CommunicationPlan
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
