"""Norms with running statistics: their parameters are not cast to the dtype of compute.

Statistics may be cast after ``fully_shard``, as FSDP2's documentation says for training BatchNorm
in 16 bits. So parameters of such norms are in groups of their own, and the first forward decides
their dtype of compute (`Unit.follow_statistics`).
"""

from __future__ import annotations

import torch
from torch import nn


def has_statistics(module: nn.Module | None) -> bool:
    """Whether a module is a norm with running statistics."""
    return isinstance(getattr(module, "running_mean", None), torch.Tensor)


def follows_statistics(module: nn.Module | None, param: torch.Tensor) -> bool:
    """Whether a parameter must have the dtype of its module's running statistics.

    ``torch.batch_norm`` takes an input of 16 bits with parameters and statistics in float32, as
    under autocast. It raises if only the parameters have 16 bits. Buffers are not cast, so in
    modules with a ``running_mean`` (BatchNorm, InstanceNorm) parameters are not cast either. FSDP2
    casts them (torch 2.13), and the forward raises.
    """
    return has_statistics(module) and module.running_mean.dtype == param.dtype  # type: ignore[union-attr]
