"""Muon as the paper writes it: one parameter after another, to one rank and back.

Algorithm 2 of arXiv 2602.22437: redistribute to the root, Newton-Schulz there, redistribute back,
update. Slow and obvious; it shares nothing with the packed exchange but the numbers, and the
packed exchange must give its bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat
from vescale_fsdp.compat import DTensorSpec, TensorMeta
from vescale_fsdp.optim.base import Group, assign, local_of, zeros_placed
from vescale_fsdp.optim.matrices.layout import split_heights
from vescale_fsdp.optim.muon.rule import apply_update, direction, orthogonalized
from vescale_fsdp.ragged import RaggedShard, contiguous_strides, wrap


def step_whole(
    param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, group: Group
) -> None:
    """Step on a parameter that is whole here; all tensors of its shape."""
    update = direction(grad, momentum, group)
    pairs = zip(_matrices(param, group), _matrices(update, group), strict=True)
    for part, matrix in pairs:
        apply_update(part, orthogonalized(matrix, group), group, *matrix.shape)


def step_by_redistribution(
    param: DTensor, grad: torch.Tensor, momentum: torch.Tensor, group: Group, root: int
) -> None:
    """Step on a sharded parameter.

    Args:
        param: the parameter.
        grad, momentum: this rank's parts, of this step.
        root: place along the mesh axis that cuts, of the rank that computes.
    """
    spec = param._spec
    update = direction(grad, momentum, group).bfloat16()
    meta = TensorMeta(spec.shape, contiguous_strides(spec.shape), update.dtype)
    whole = wrap(update, DTensorSpec(spec.mesh, spec.placements, meta)).redistribute(
        placements=_on_one(spec.placements, spec.mesh.shape, root)
    )
    local = whole._local_tensor
    if local.numel():
        result = local.reshape(spec.shape).clone()
        for matrix in _matrices(result, group):
            matrix.copy_(orthogonalized(matrix, group))
        local = result.view(local.shape)
    returned = wrap(local, whole._spec).redistribute(placements=spec.placements)
    _apply(param, local_of(returned), group)


def _on_one(
    placements: Sequence[Placement], mesh_shape: Sequence[int], root: int
) -> list[Placement]:
    """All on one rank of the first axis that cuts; replicated along all others.

    Everywhere, if an axis is strided: a RaggedShard cannot be made of that.
    """
    target: list[Placement] = [Replicate()] * len(placements)
    cutting = [axis for axis, p in enumerate(placements) if not p.is_replicate()]
    ragged = [axis for axis in cutting if isinstance(placements[axis], RaggedShard)]
    if cutting and not any(isinstance(p, compat.StridedShard) for p in placements):
        axis = (ragged or cutting)[0]
        size = mesh_shape[axis]
        target[axis] = RaggedShard.owner(root % size, size)
    return target


def _apply(param: DTensor, update: torch.Tensor, group: Group) -> None:
    """Apply the update where the parameter lies; the rate depends on the height of the matrix."""
    rows, cols = param.shape[-2:]
    heights = split_heights(rows, group["split_rows"])
    local = local_of(param)
    if len(set(heights)) == 1:
        apply_update(local, update, group, heights[0], cols)
        return
    by_row = torch.cat([torch.full((height, 1), height) for height in heights])
    by_element = by_row.expand(param.shape).contiguous()
    height_of = local_of(assign(zeros_placed(param, by_row.dtype), by_element))
    before = local.clone()
    for height in set(heights):
        moved = before.clone()
        apply_update(moved, update, group, height, cols)
        local.copy_(torch.where(height_of == height, moved, local))


def _matrices(tensor: torch.Tensor, group: Group) -> Iterator[torch.Tensor]:
    """Views of the matrices of a whole tensor, in storage order."""
    *stack, rows, _ = tensor.shape
    heights = split_heights(rows, group["split_rows"])
    for index in product(*map(range, stack)):
        yield from tensor[index].split(heights)
