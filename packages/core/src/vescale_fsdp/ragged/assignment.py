"""``x.data = new``, where torch's own would change what autograd sees and no element."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.compat import TENSOR_DATA

NAME = "_vescale_fsdp_name"  # on a sharded parameter: what errors call it


def assign(tensor: DTensor, new: torch.Tensor) -> None:
    """Take over the values of ``new``; see ``RaggedTensor.data``.

    Raises:
        ValueError: nothing says where ``new`` lies, or it is another tensor.
    """
    mesh, shape = tensor.device_mesh, tensor.shape
    if not isinstance(new, DTensor) or (new.device_mesh, new.shape) != (mesh, shape):
        raise _refusal(tensor, new)
    with torch.no_grad():
        plain = cast(DTensor, new.detach())
        moved: Any = plain.redistribute(placements=tensor.placements)
        own, local = tensor._local_tensor, moved._local_tensor
        if local is own:  # ``x.data += y`` assigns what it has written to
            return
        if (local.dtype, local.device) == (own.dtype, own.device):
            own.copy_(local)
        else:
            TENSOR_DATA.__set__(tensor, moved)
            tensor._local_tensor, tensor._spec = local, moved._spec


def _refusal(tensor: DTensor, new: torch.Tensor) -> ValueError:
    name = getattr(tensor, NAME, None)
    what = "the data of a sharded tensor" if name is None else f"the data of parameter {name!r}"
    found = f"{type(new).__name__} of shape {tuple(new.shape)}"
    if isinstance(new, DTensor):
        found += f" on {new.device_mesh}"
    return ValueError(
        f"{what} was to be replaced by a {found}; expected a DTensor of shape "
        f"{tuple(tensor.shape)} on {tensor.device_mesh}. Make it one by `distribute_tensor(new, "
        "p.device_mesh, p.placements)`, compute it of `p.full_tensor()`, or write to the full "
        "parameter inside of `with unsharded(module, writeback=True)`"
    )
