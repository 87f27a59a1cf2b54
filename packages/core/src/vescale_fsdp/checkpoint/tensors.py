"""Checks that a tensor can be saved, and copies it to host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vescale_fsdp import compat, devices
from vescale_fsdp.checkpoint.manifest import DTYPES
from vescale_fsdp.errors import CheckpointValueError

_PIECE = 1 << 16  # elements: at most 1 MiB, which fits the processor's cache


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a manifest."""
    return str(dtype).removeprefix("torch.")


def is_float(dtype: torch.dtype) -> bool:
    """Whether elements of this dtype may be cast. Floats of 8 bits may not: they need a scale."""
    return dtype.is_floating_point and dtype.itemsize > 1


def check(tensor: torch.Tensor, name: str) -> None:
    """Raise if this rank's part of a tensor cannot be saved."""
    local = plain(compat.local_tensor(tensor))
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


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Unwrap subclasses that hold one tensor with the same elements. Others are returned as is."""
    while compat.is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = getattr(tensor, names[0])
        if len(names) > 1 or inner.shape != tensor.shape or inner.dtype != tensor.dtype:
            break
        tensor = inner
    return tensor


def exchange(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Exchange the elements of two tensors in place, and return True.

    Returns False and does nothing if that needs a cast or a copy between devices. It needs no new
    memory, whose page faults would cost more than the copy.
    """
    if type(a) is not torch.Tensor or type(b) is not torch.Tensor:
        return False
    is_plain = a.is_contiguous() and b.is_contiguous() and a.shape == b.shape
    if not is_plain or a.dtype != b.dtype or a.device.type != "cpu" or b.device.type != "cpu":
        return False
    spare = torch.empty(min(_PIECE, a.numel()), dtype=a.dtype)
    for mine, others in zip(a.view(-1).split(_PIECE), b.view(-1).split(_PIECE), strict=True):
        kept = spare[: mine.numel()].copy_(mine)
        mine.copy_(others)
        others.copy_(kept)
    return True


def on_host(tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """Return the elements in row-major order in host memory. Copies only if needed, or ``copy``."""
    data = plain(tensor.detach()).resolve_conj().resolve_neg()
    if not copy:
        return devices.on_host(data)
    staging = devices.Staging()
    copied = staging.copy(data)
    staging.wait()
    return copied


def staged(tensor: torch.Tensor, staging: devices.Staging) -> torch.Tensor:
    """Return a copy in host memory, in row-major order. Valid after ``staging.wait()``."""
    return staging.copy(plain(tensor.detach()).resolve_conj().resolve_neg())


def box_of(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a copy of the elements of a box."""
    index = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    return whole[index].clone(memory_format=torch.contiguous_format)


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return the names of tied parameters and buffers, each with the first name of its tensor.

    Example: ``{"lm_head.weight": "embed.weight"}``.
    """
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for path, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        fqn = compat.fqn_of(model, path)
        kept = first.setdefault(id(tensor), fqn)
        if kept != fqn:
            ties[fqn] = kept
    return ties
