"""How many steps optimizers have made on sharded weights in this process.

What is gathered and kept is out of date after a step. Versions of tensors do not tell: fused
kernels, and those for lists of tensors, write to sharded tensors without raising them (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_num_steps = 0


def num_steps() -> int:
    """Steps so far, of optimizers that have at least one sharded parameter."""
    return _num_steps


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # Others may be on one rank only, where the ranks would then disagree.
    global _num_steps
    params = (param for group in optimizer.param_groups for param in group["params"])
    _num_steps += any(isinstance(param, DTensor) for param in params)


register_optimizer_step_post_hook(_count)
