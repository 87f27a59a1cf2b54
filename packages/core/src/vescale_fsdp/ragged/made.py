"""Functions of torch that make a DTensor, where its placements have a RaggedShard.

Torch takes a placement that it does not know for replication: the local tensor would be the whole
on each rank, with a label that says otherwise. So ``DTensor.from_local`` and
``torch.distributed.tensor.zeros`` (and ``ones``, ``full``, ``empty``, ``rand``, ``randn``) make a
`RaggedTensor` here. What describes a part as one box with an offset is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from vescale_fsdp import compat
from vescale_fsdp.ragged.placement import RaggedShard
from vescale_fsdp.ragged.recuts import held_here
from vescale_fsdp.ragged.tensor import (
    RaggedTensor,
    distribute,
    fill,
    make_spec,
    wrap_local,
)


def from_local(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    shape: Sequence[int] | None = None,
    **ignored: Any,
) -> RaggedTensor:
    """``DTensor.from_local`` for a RaggedShard. Nothing is compared between ranks.

    Raises:
        TypeError: without ``shape``: the flat parts of the ranks do not tell it.
        ValueError: as `RaggedTensor.from_local`.
    """
    if shape is None:
        raise TypeError(
            f"DTensor.from_local with {list(placements)} needs the shape of the whole tensor, "
            "which flat parts do not tell: add shape=p.shape, stride=p.stride(), or compute on "
            "the sharded tensor itself"
        )
    return RaggedTensor.from_local(local_tensor, device_mesh, placements, shape=shape)


def created(
    operator: Callable[..., torch.Tensor],
    shape: Sequence[int],
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    fill_value: float = 0,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    **ignored: Any,
) -> RaggedTensor:
    """Make a tensor as ``operator`` does (``torch.zeros``, ...). No communication."""
    spec = make_spec(device_mesh, placements, shape, dtype or torch.get_default_dtype())
    size, device = held_here(spec).local_shape, device_mesh.device_type
    if operator is torch.full:
        # The dtype of ``torch.full`` is that of its value, if none is given.
        local = torch.full(size, fill_value, dtype=dtype, device=device)
        spec = make_spec(device_mesh, placements, shape, local.dtype)
    elif operator in (torch.rand, torch.randn):
        local = torch.empty(size, dtype=dtype, device=device)
    else:
        local = operator(size, dtype=dtype, device=device)
    made = wrap_local(local, spec, False)
    if operator is torch.rand:
        made.uniform_()
    elif operator is torch.randn:
        made.normal_()
    made.requires_grad_(requires_grad)
    return made


def _is_ragged(placement: Placement) -> bool:
    return isinstance(placement, RaggedShard)


compat.route_from_local(_is_ragged, from_local)
compat.route_creation(_is_ragged, created)
compat.refuse_boxes(
    _is_ragged,
    "{placements} gives a rank a flat range of elements, which has no shape and offset of its own: "
    "use RaggedShard.local_range(shape, rank), or full_tensor(); for code that slices tensors by "
    "Shard, call fully_shard(..., shard_placement_fn=lambda p: Shard(0))",
)
compat.route_redistribute(_is_ragged, RaggedTensor.redistribute)
compat.route_distribution(
    _is_ragged, distribute, lambda value: isinstance(value, RaggedTensor), fill
)
compat.compile_for_each_shape(_is_ragged)
