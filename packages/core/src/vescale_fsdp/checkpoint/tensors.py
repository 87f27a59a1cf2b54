"""Tensors as bytes: what can be saved, and how it comes to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vescale_fsdp import compat, devices
from vescale_fsdp.checkpoint.manifest import DTYPES
from vescale_fsdp.errors import CheckpointValueError

_PIECE = 1 << 16  # elements: at most 1 MiB, and so in the processor's cache


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a manifest."""
    return str(dtype).removeprefix("torch.")


def is_float(dtype: torch.dtype) -> bool:
    """Whether elements of this dtype mean the same in another one: no scale belongs to them."""
    return dtype.is_floating_point and dtype.itemsize > 1


def check(tensor: torch.Tensor, name: str) -> None:
    """Raise unless the elements of this rank's part are plain memory."""
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
    """The one tensor of the same elements that a wrapper holds; wrappers of several as they are."""
    while compat.is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = getattr(tensor, names[0])
        if len(names) > 1 or inner.shape != tensor.shape or inner.dtype != tensor.dtype:
            break
        tensor = inner
    return tensor


def exchange(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Give each the other's elements, piece by piece. Where that takes no casts, and no copies
    between devices; else nothing is done, and the result is False.

    It needs no memory, which a copy of the old elements would: new pages cost more than the copy.
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
    """The elements in row-major order in the host's memory; the same memory where they are so."""
    data = plain(tensor.detach()).resolve_conj().resolve_neg()
    if not copy:
        return devices.on_host(data)
    staging = devices.Staging()
    copied = staging.copy(data)
    staging.wait()
    return copied


def staged(tensor: torch.Tensor, staging: devices.Staging) -> torch.Tensor:
    """A copy in the host's memory, in row-major order, to be read when ``staging`` is through."""
    return staging.copy(plain(tensor.detach()).resolve_conj().resolve_neg())


def box_of(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The elements of a box, in memory of their own."""
    index = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    return whole[index].clone(memory_format=torch.contiguous_format)


def ties_of(model: nn.Module) -> dict[str, str]:
    """Names of parameters and buffers that are tied to others: each with the first of its tensor.

    For ``lm_head.weight`` that is ``embed.weight``: ``{"lm_head.weight": "embed.weight"}``.
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
