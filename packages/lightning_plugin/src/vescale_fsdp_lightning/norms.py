"""``grad_norm``: Lightning's of the same name, also of sharded gradients.

``lightning.pytorch.utilities.grad_norm`` raises for them that data is not allocated yet.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["grad_norm"]


def grad_norm(
    module: nn.Module, norm_type: float | str, group_separator: str = "/"
) -> dict[str, torch.Tensor]:
    """Return the norm of each gradient and of all together, by Lightning's names. Collective.

    Cost: an all-reduce of one number for each sharded gradient.

    Raises:
        ValueError: ``norm_type`` is not a positive number.
    """
    kind = float(norm_type)
    if kind <= 0:
        raise ValueError(f"norm_type is {norm_type}; it must be a positive number or 'inf'")
    norms = {
        f"grad_{kind}_norm{group_separator}{name}": _whole(param.grad.detach().norm(kind))
        for name, param in module.named_parameters()
        if param.grad is not None
    }
    if norms:
        norms[f"grad_{kind}_norm_total"] = torch.stack(list(norms.values())).norm(kind)
    return norms


def _whole(number: torch.Tensor) -> torch.Tensor:
    if not isinstance(number, DTensor):
        return number
    # Norms of offloaded gradients are on the CPU, which NCCL does not support.
    there = cast(DTensor, number.to(number.device_mesh.device_type))
    whole: torch.Tensor = there.full_tensor()
    return whole
