"""Muon's numbers, for one matrix or a piece of it. All of Muon's ways of moving data share them.

The element-wise steps give the same bits wherever a tensor is cut: in fp32 torch's kernels do, and
half precision is computed in fp32 and rounded once.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vescale_fsdp.optim.muon.newton_schulz import newton_schulz

Group = dict[str, Any]


def direction(grad: torch.Tensor, momentum: torch.Tensor, group: Group) -> torch.Tensor:
    """What is to be orthogonalized, of gradient and momentum (this step's). Any shape."""
    return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def orthogonalized(matrix: torch.Tensor, group: Group) -> torch.Tensor:
    """[rows, cols] -> [rows, cols] in bf16."""
    return newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


def apply_update(
    param: torch.Tensor, update: torch.Tensor, group: Group, rows: int, cols: int
) -> None:
    """Decay and move a piece of a matrix of ``rows`` x ``cols``, in place.

    Args:
        param: any shape.
        update: in bf16, of the same shape.
    """
    rate = float(group["lr"])
    decay, step = 1 - rate * group["weight_decay"], -rate * _adjustment(group, rows, cols)
    if param.dtype.itemsize > 2:
        param.mul_(decay).add_(update, alpha=step)
    else:
        param.copy_(param.float().mul_(decay).add_(update, alpha=step))


def _adjustment(group: Group, rows: int, cols: int) -> float:
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1, rows / cols))
