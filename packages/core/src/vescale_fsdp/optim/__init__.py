"""Optimizers for sharded parameters, built on the public engine.

`flatten_` lets an element-wise optimizer of ``torch.optim`` step once per group on the contiguous
shard.
"""

from vescale_fsdp.optim.flatten import flatten_

__all__ = ["flatten_"]
