"""Parameters that are DTensors already: cut by tensor or expert parallelism, then by us.

The inner parallelism comes first. What it leaves on a rank is a plain tensor, and that is what a
group lays out, gathers and reduces. Outside, the parameter is one DTensor over all axes, the data
axes first; inside of a forward it is the DTensor that the user has made::

    at rest         mesh (data, tensor)    (RaggedShard, Shard(0))    global shape
    gathered        mesh (tensor,)         (Shard(0),)                global shape, a view of the
                                                                      full buffer as local tensor
    in the buffer                                                     local shape of this rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.compat import AsyncCollectiveTensor, DTensorSpec, TensorMeta
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.ragged import RaggedShard, contiguous_strides
from vescale_fsdp.ragged.tensor import make_spec

__all__ = [
    "as_gathered",
    "inner_spec",
    "local_data",
    "local_gradient",
    "mesh_at_rest",
    "placements_of",
    "spec_at_rest",
]


def inner_spec(param: torch.Tensor) -> DTensorSpec | None:
    """The spec of a parameter that is a DTensor; None for a plain one."""
    return param._spec if isinstance(param, DTensor) else None


def local_data(param: nn.Parameter) -> torch.Tensor:
    """What this rank has of a parameter before we shard it."""
    return (param._local_tensor if isinstance(param, DTensor) else param).detach()


def placements_of(
    axes: Axes, sharded: Placement, inner: DTensorSpec | None
) -> tuple[Placement, ...]:
    """The placements at rest: those of the data axes, then those of the inner parallelism."""
    if inner is None:
        return axes.placements(sharded)
    assert isinstance(sharded, RaggedShard), "Shard(d) after an inner parallelism is refused"
    split = math.prod(
        inner.mesh.size(axis)
        for axis, placement in enumerate(inner.placements)
        if isinstance(placement, Shard) and placement.dim < len(sharded.dims)
    )
    return (*axes.placements(sharded.with_split_factor(split)), *inner.placements)


def mesh_at_rest(axes: Axes, inner: DTensorSpec | None, fqn: str) -> DeviceMesh:
    """The mesh at rest: the data axes, then those of the inner parallelism.

    Raises:
        NotImplementedError: the inner parallelism leaves parts of different size to its ranks.
        ValueError: the meshes are not cut from one.
    """
    if inner is None:
        return axes.mesh
    for axis, placement in enumerate(inner.placements):
        if isinstance(placement, Shard) and inner.shape[placement.dim] % inner.mesh.size(axis):
            raise NotImplementedError(
                f"fully_shard: parameter {fqn!r} of shape {tuple(inner.shape)} is unevenly cut by "
                f"{placement} over {inner.mesh.size(axis)} ranks; pad that dimension to a multiple"
            )
    return axes.joined(inner.mesh)


def spec_at_rest(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a contiguous tensor, ragged or with ``Shard``."""
    if any(isinstance(placement, RaggedShard) for placement in placements):
        return make_spec(mesh, placements, shape, dtype)
    meta = TensorMeta(torch.Size(shape), contiguous_strides(shape), dtype)
    return DTensorSpec(mesh, tuple(placements), meta)


def as_gathered(view: torch.Tensor, inner: DTensorSpec | None) -> torch.Tensor:
    """The gathered parameter around its view of the full buffer, as the user's code knows it."""
    if inner is None:
        return view
    meta = inner.tensor_meta
    assert meta is not None, "every DTensor that exists has its meta"
    cast = DTensorSpec(
        inner.mesh, inner.placements, TensorMeta(meta.shape, meta.stride, view.dtype)
    )
    return DTensor(view, cast, requires_grad=False)


def local_gradient(gradient: torch.Tensor, inner: DTensorSpec | None) -> torch.Tensor:
    """This rank's part of a gradient. A partial sum over the inner axes is summed there first."""
    if inner is None:
        return gradient
    assert isinstance(gradient, DTensor), "autograd gives gradients of the parameter's type"
    if gradient.placements != inner.placements:
        gradient = gradient.redistribute(placements=inner.placements)
    local = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
