"""Where preconditioners rest: whole matrices, or rows of blocks, with one rank each.

All matrices of a parameter are a stack, and each of its states is one tensor with the stack in
front. Ranks hold consecutive parts of it, in their order, so that each state is a DTensor with a
RaggedShard and a checkpoint reshards it. A stack of five matrices of shape (4, 4) on three ranks::

    owner               0   0   2   2   2           counts (2, 0, 3)
    left  (5, 4, 4)   | 32 elements | | 48 elements |

On a mesh whose other axes hold replicas, each replica holds all of it. If several axes shard,
the stack is cut over a mesh of one axis that is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp import compat
from vescale_fsdp.compat import DTensorSpec, TensorMeta
from vescale_fsdp.optim.base import local_of, zeros_placed
from vescale_fsdp.optim.matrices.layout import layout_of
from vescale_fsdp.ragged import RaggedShard, RaggedTensor, contiguous_strides, wrap


class Line(NamedTuple):
    """The ranks over which the matrices of a parameter are given out, one replica of it."""

    mesh: DeviceMesh
    axis: int  # of the mesh; the others hold replicas

    @property
    def num_ranks(self) -> int:
        return int(self.mesh.size(self.axis))


def line_of(param: torch.Tensor) -> Line | None:
    """The ranks that hold one replica of a parameter; None if each holds all of it.

    Collective among them, at the first call, if several axes of its mesh shard the parameter.
    """
    if not isinstance(param, DTensor):
        return None
    axes = [axis for axis, p in enumerate(param.placements) if not p.is_replicate()]
    if not axes:
        return None
    if len(axes) == 1:
        return Line(param.device_mesh, axes[0])
    rank = torch.distributed.get_rank()
    ranks = next(ranks for ranks in layout_of(param).grid() if rank in ranks)
    return Line(compat.mesh_over(list(ranks), param.device_mesh), 0)


def resting_line(state: torch.Tensor) -> Line | None:
    """The line over which a state is given out; None if every rank holds all of it."""
    if not isinstance(state, RaggedTensor):
        return None
    return Line(state.device_mesh, state.ragged_axis)


def zeros_resting(
    param: torch.Tensor,
    line: Line | None,
    dtype: torch.dtype,
    shape: Sequence[int],
    counts: Sequence[int],
) -> torch.Tensor:
    """A state of zeros of which each rank of the line holds its count of equal parts.

    Args:
        param: gives the device.
        line: of the parameter; None if every rank holds all.
        dtype: of the state.
        shape: of the whole state.
        counts: by rank of the line.
    """
    if line is None:
        return zeros_placed(param, dtype, shape)
    part, rest = divmod(math.prod(shape), sum(counts))
    assert not rest, f"{sum(counts)} equal parts of a state of shape {tuple(shape)}"
    ragged = RaggedShard.from_runs_of_elements([(1, count * part) for count in counts], shape)
    placements = tuple(
        ragged if axis == line.axis else Replicate() for axis in range(line.mesh.ndim)
    )
    here = line.mesh.get_local_rank(line.axis)
    local = torch.zeros(counts[here] * part, dtype=dtype, device=local_of(param).device)
    meta = TensorMeta(torch.Size(shape), contiguous_strides(shape), dtype)
    return wrap(local, DTensorSpec(line.mesh, placements, meta))


def counts_of(state: torch.Tensor, num_parts: int) -> list[int]:
    """How many of the equal parts of a resting state each rank of its line holds."""
    assert isinstance(state, RaggedTensor), "states that rest somewhere are ragged"
    placement = state.ragged_placement
    scale, rest = divmod(num_parts, placement.total_units)
    assert not rest, "each rank holds whole parts"
    return [units * scale for units in placement.local_units]


def held_of(state: torch.Tensor, num_parts: int) -> range:
    """Which of the equal parts of a resting state this rank holds."""
    if not isinstance(state, RaggedTensor):
        return range(num_parts)
    part = math.prod(state.shape) // num_parts
    start, stop = state.local_range
    return range(start // part, stop // part)
