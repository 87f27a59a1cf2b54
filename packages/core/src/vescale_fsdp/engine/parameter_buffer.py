"""What gradients need to know of where their parameters lie."""

from __future__ import annotations

from typing import Protocol

import torch

from vescale_fsdp.planner import ShardLayout


class ParameterBuffer(Protocol):
    """What gradients need to know of the parameters: a `DBuffer`, or what stands for one."""

    @property
    def layout(self) -> ShardLayout:
        """Where each tensor lies."""

    @property
    def rank(self) -> int:
        """Of the caller along the axis that shards."""

    @property
    def shard(self) -> torch.Tensor:
        """Has the device and dtype in which parameters and gradients rest."""

    @property
    def full_dtype(self) -> torch.dtype:
        """Of the gathered parameters, and so of the gradients that autograd makes."""
