"""Tensors as bytes: what can be saved, and how it comes to the host."""

from __future__ import annotations

import torch

from vescale_fsdp import compat
from vescale_fsdp.checkpoint.manifest import DTYPES
from vescale_fsdp.errors import CheckpointValueError

__all__ = ["check", "dtype_name", "on_host"]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a manifest."""
    return str(dtype).removeprefix("torch.")


def check(tensor: torch.Tensor, name: str) -> None:
    """Raise unless the elements of this rank's part are plain memory.

    Raises:
        CheckpointValueError: naming the tensor, and what it is.
    """
    local = _plain(compat.local_tensor(tensor))
    if compat.is_wrapper(local):
        found = f"holds several tensors ({type(local).__name__})"
    elif tensor.device.type == "meta" or local.device.type == "meta":
        found = "is on the meta device: call to_empty(device=...) and initialize it first"
    elif local.layout is not torch.strided or local.is_nested:
        found = f"has the layout {local.layout}"
    elif dtype_name(local.dtype) not in DTYPES:
        found = f"has the dtype {local.dtype}"
    else:
        return
    raise CheckpointValueError(
        f"{name!r} {found}; a checkpoint keeps dense tensors only. Convert it, or leave it out"
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The one tensor of the same elements that a wrapper holds; wrappers of several as they are."""
    while compat.is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = getattr(tensor, names[0])
        if len(names) > 1 or inner.shape != tensor.shape or inner.dtype != tensor.dtype:
            break
        tensor = inner
    return tensor


def on_host(tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """The elements in row-major order in the host's memory; the same memory where they are so."""
    plain = _plain(tensor.detach()).resolve_conj().resolve_neg()
    return plain.to("cpu", copy=copy, memory_format=torch.contiguous_format).contiguous()
