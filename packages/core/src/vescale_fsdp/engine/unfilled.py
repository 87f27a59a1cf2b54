"""Tensors of a module beside what is sharded: those without values, and buffers to broadcast.

Tensors without values are on the meta device, or were not written to since ``to_empty``.

If a parameter is on the meta device in the first forward, the engine raises before it communicates.
After ``to_empty`` a tensor has uninitialized memory. To initialize it, code writes to it, which
increases its version, or registers another tensor. So the same tensor with the same version is
still uninitialized.

A forward changes some buffers, such as BatchNorm's running statistics. ``DistributedDataParallel``
broadcasts them from rank 0 at the beginning of a forward. With FSDP2 each rank has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat
from vescale_fsdp.engine.fsdp_param import FSDPParam
from vescale_fsdp.errors import warn_user
from vescale_fsdp.ragged import RaggedTensor
from vescale_fsdp.ranks import collectives


def check_materialized(modules: Iterable[nn.Module], fsdp_params: Iterable[FSDPParam]) -> None:
    """Raise if a parameter of a unit with these modules is on the meta device."""
    on_meta = [fsdp_param for fsdp_param in fsdp_params if fsdp_param.registered().is_meta]
    if on_meta:
        names = [fsdp_param.fqn for fsdp_param in _children_first(modules, on_meta)]
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, "
            f"but the following were still on meta device: {names}\n"
            "For example, call module.to_empty(device) to materialize to device and "
            "call module.reset_parameters() on each module to initialize values."
        )


def _children_first(modules: Iterable[nn.Module], fsdp_params: list[FSDPParam]) -> list[FSDPParam]:
    """Return the parameters in FSDP2's order: those of a module after those of its children."""
    places: dict[tuple[int, str], int] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        for name in module._parameters:
            places.setdefault((id(module), name), len(places))

    for module in modules:
        visit(module)

    def place(fsdp_param: FSDPParam) -> int:
        found = (places.get((id(ref()), name)) for ref, name in fsdp_param.sites)
        return min((each for each in found if each is not None), default=len(places))

    return sorted(fsdp_params, key=place)


# Of a tensor: which it is, as copies take over its attributes, and its version. Weak references in
# a dictionary would be in the way of `torch.utils.swap_tensors`.
_MARK = "_vescale_fsdp_blank"


def on_meta(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return modules and names of the parameters and buffers below a module that are on meta."""
    return [
        (owner, name)
        for owner in module.modules()
        for name, tensor in _tensors_of(owner)
        if tensor.is_meta
    ]


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate and initialize the tensors that are on the meta device.

    Values come from ``reset_parameters()``, or from the model's ``_init_weights(module)``, which
    models of ``transformers`` have. Other tensors do not change. Each rank fills its own shards
    with the values that the full parameters would get. Call it after ``fully_shard``.
    """
    lacking = [
        each for each in module.modules() if any(tensor.is_meta for _, tensor in _tensors_of(each))
    ]
    if not lacking:
        return

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    module._apply(fill)
    owners = [each for each in module.modules() if callable(getattr(each, "_init_weights", None))]
    left: set[str] = set()
    for each in lacking:
        reset = getattr(each, "reset_parameters", None)
        if callable(reset):
            reset()
        elif owners:
            owners[-1]._init_weights(each)  # type: ignore[operator]
        else:
            left.add(type(each).__name__)
    if left:
        warn_user(
            f"{', '.join(sorted(left))} were made on the meta device and have no "
            "reset_parameters(): their parameters and buffers have no values yet; load a "
            "checkpoint, or initialize them"
        )


def mark_blank(tensors: Iterable[torch.Tensor]) -> None:
    """Record that these tensors have no values."""
    for tensor in tensors:
        if not tensor.is_meta:
            setattr(tensor, _MARK, (id(tensor), _version_of(tensor)))


def blank_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model that have no values, by name.

    Buffers that are not in the state dict are included. Tied tensors have several names.
    """
    return {
        compat.fqn_of(model, f"{prefix}.{name}" if prefix else name): tensor
        for prefix, owner in model.named_modules(remove_duplicate=False)
        for name, tensor in _tensors_of(owner)
        if tensor.numel() and _is_blank(tensor)
    }


def _tensors_of(owner: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _is_blank(tensor: torch.Tensor) -> bool:
    mark = getattr(tensor, _MARK, None)
    return mark is not None and mark == (id(tensor), _version_of(tensor))


def _version_of(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor._version if isinstance(tensor, RaggedTensor) else 0
    return tensor._version + local


if TYPE_CHECKING:
    from vescale_fsdp.engine.axes import Axes


def plain_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module by name, without DTensors and empty ones."""
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if not isinstance(buffer, DTensor) and not buffer.is_meta and buffer.numel()
    }


@torch.no_grad()
def broadcast_buffers(module: nn.Module, axes: Iterable[Axes]) -> None:
    """Broadcast the buffers of the first rank. Collective.

    As in DDP, the writes are hidden from autograd, which may have saved the buffers for a backward.

    Args:
        axes: of the module's groups. Those with the most ranks are used.

    Cost: one message of all buffers; two with replicas.
    """
    buffers = list(plain_buffers(module).values())
    widest = max(axes, key=lambda each: len(each.ranks), default=None)
    if not buffers or widest is None or len(widest.ranks) == 1:
        return
    # Wide dtypes first, so that each part begins where its dtype may.
    buffers.sort(key=lambda buffer: -buffer.element_size())
    device = torch.device(widest.mesh.device_type)
    packed = torch.cat([b.reshape(-1).view(torch.uint8).to(device) for b in buffers])
    for axis in (widest.replicate, widest.shard):
        if axis is not None and widest.mesh.size(axis) > 1:
            first = collectives.axis_ranks(widest.mesh, axis)[0]
            collectives.broadcast(packed, first, collectives.mesh_group(widest.mesh, axis)).wait()
    if widest.rank == widest.replica == 0:
        return
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    with compat.preserve_versions(tuple(buffers)):
        for buffer, part in zip(buffers, packed.split(sizes), strict=True):
            buffer.copy_(part.view(buffer.dtype).view(buffer.shape))
