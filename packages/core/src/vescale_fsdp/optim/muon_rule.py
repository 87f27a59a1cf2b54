"""Muon's arithmetic for one matrix or a part of it, and a simple reference implementation.

Newton-Schulz approximates the nearest (semi-)orthogonal matrix with matrix products only. With
X = U S V^T, each step replaces S by the polynomial a S + b S^3 + c S^5. Muon's coefficients raise
small singular values quickly, and leave the others between about 0.7 and 1.2. They do not converge
to 1, which training does not need. The element-wise operations give the same bits for any split of
a tensor: in fp32 torch's kernels do so, and half precision is computed in fp32 and rounded once.

`step_by_redistribution` is the paper's algorithm: one parameter after another is redistributed to
one rank and back. It is slow and simple. The packed exchange in `muon` must give the same bits.

Source: Keller Jordan's Muon (kellerjordan.github.io/posts/muon), arXiv 2502.16982 for large models,
arXiv 2602.22437, Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat
from vescale_fsdp.compat import TensorMeta
from vescale_fsdp.optim.base import Group, assign, local_of, zeros_placed
from vescale_fsdp.optim.layout import split_heights
from vescale_fsdp.ragged import RaggedShard, contiguous_strides, redistribute, spec_of, wrap


def newton_schulz(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return an orthogonal matrix near ``matrix``, in bf16. The argument does not change.

    The result is bitwise that of torch's Muon. (Torch's function changes an argument in bf16,
    pytorch#194664.)

    Args:
        matrix: [rows, cols], any floating dtype.
        coefficients: a, b and c of the polynomial.
        steps: number of times that it is applied.
        eps: the smallest norm to divide by.

    Returns:
        [rows, cols]; a transposed view if there are more rows than columns. All NaN if a value of
        the matrix is not finite.

    Cost: `newton_schulz_cost`; memory for about four copies of the matrix in bf16.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x  # products then have the size of the short side
    x = x / x.norm().clamp(min=eps)  # singular values are at most 1
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def newton_schulz_cost(rows: int, cols: int, steps: int) -> int:
    """Return the floating-point operations of ``steps`` steps on a matrix."""
    short, long = min(rows, cols), max(rows, cols)
    return 2 * steps * short * short * (2 * long + short)


def direction(grad: torch.Tensor, momentum: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the tensor to orthogonalize, from gradient and updated momentum. Any shape."""
    return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def orthogonalized(matrix: torch.Tensor, group: Group) -> torch.Tensor:
    """Orthogonalize a matrix with the options of a group. [rows, cols] -> [rows, cols] in bf16."""
    return newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


def apply_update(
    param: torch.Tensor, update: torch.Tensor, group: Group, rows: int, cols: int
) -> None:
    """Apply weight decay and update to a part of a matrix of ``rows`` x ``cols``, in place.

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


def step_whole(
    param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, group: Group
) -> None:
    """Step on a parameter that is not sharded. All tensors have its shape."""
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
        grad, momentum: this rank's parts. The momentum is already updated.
        root: the rank that computes, as its index along the mesh axis that shards.
    """
    spec = param._spec
    update = direction(grad, momentum, group).bfloat16()
    meta = TensorMeta(spec.shape, contiguous_strides(spec.shape), update.dtype)
    there = _on_one(spec.placements, spec.mesh.shape, root)
    moved = wrap(update, spec_of(spec.mesh, spec.placements, meta))
    whole = redistribute(moved, placements=there)
    local = whole._local_tensor
    if local.numel():
        result = local.reshape(spec.shape).clone()
        for matrix in _matrices(result, group):
            matrix.copy_(orthogonalized(matrix, group))
        local = result.view(local.shape)
    returned = redistribute(wrap(local, whole._spec), placements=spec.placements)
    _apply(param, local_of(returned), group)


def _on_one(
    placements: Sequence[Placement], mesh_shape: Sequence[int], root: int
) -> list[Placement]:
    """Return placements with all elements on one rank of the first axis that shards.

    They are replicated along all other axes; and along all axes if a placement is strided, because
    that cannot be redistributed to a RaggedShard.
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
    """Apply the update to this rank's part. The learning rate depends on the matrix' shape."""
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
    """Yield views of the matrices of a full tensor, in storage order."""
    *stack, rows, _ = tensor.shape
    heights = split_heights(rows, group["split_rows"])
    for index in product(*map(range, stack)):
        yield from tensor[index].split(heights)
