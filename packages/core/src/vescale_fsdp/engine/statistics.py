"""Norms with running statistics: their parameters are not cast to the dtype of compute."""

from __future__ import annotations

import torch
from torch import nn


def follows_statistics(module: nn.Module | None, param: torch.Tensor) -> bool:
    """Whether a parameter must have the dtype of its module's running statistics.

    ``torch.batch_norm`` takes an input of 16 bits with parameters and statistics in float32, as
    under autocast. It raises if only the parameters have 16 bits. Buffers are not cast, so in
    modules with a ``running_mean`` (BatchNorm, InstanceNorm) parameters are not cast either. FSDP2
    casts them (torch 2.13), and the forward raises.
    """
    mean = getattr(module, "running_mean", None)
    return isinstance(mean, torch.Tensor) and mean.dtype == param.dtype
