"""The layout of a ragged tensor after its shape changed, where no element leaves its rank.

Pure integers on specs. Each function returns the spec of the result, or None where some rank
would need elements of another one; every rank gets the same answer. Cuts of shape (6, 4) in rows
(1, 2, 3), as the flat ranges [0, 4), [4, 12), [12, 24):

    reshaped to (3, 8)      the same ranges; the first cuts row 0: dims (0, 1), units (1, 2, 3)
    sliced to rows 1 to 5   row 0 is gone: units (0, 2, 2) of shape (4, 4)
    rescaled to (6,)        each row has become one element: units (1, 2, 3) of 1 element
    rescaled to (6, 9)      each row has 9 elements now: units (1, 2, 3) of 9 elements

Where other axes of the mesh have a ``Shard``, what it leaves must follow the same rule on each
coordinate, so less is possible there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.compat import DTensorSpec, RaggedSpec, TensorMeta
from vescale_fsdp.ragged.holdings import (
    Holding,
    boxes_of,
    contiguous_strides,
    holding_of,
    ragged_axis_of,
    remaining_box,
    split_factor_of,
)
from vescale_fsdp.ragged.placement import RaggedShard, clipped


def ragged_in(spec: DTensorSpec) -> tuple[int, RaggedShard]:
    """The axis of the RaggedShard of a spec that has one, and the RaggedShard."""
    axis = ragged_axis_of(spec.placements)
    assert axis is not None, "specs of ragged tensors have one"
    return axis, cast(RaggedShard, spec.placements[axis])


def coordinate_of(spec: DTensorSpec) -> Sequence[int]:
    """Where this rank stands in the mesh.

    Raises:
        ValueError: it is not part of the mesh.
    """
    here: Sequence[int] | None = spec.mesh.get_coordinate()
    if here is None:
        raise ValueError(f"this rank is not part of {spec.mesh}; only its ranks may hold a part")
    return here


def held_here(spec: DTensorSpec) -> Holding:
    """What this rank holds."""
    return holding_of(spec.shape, spec.placements, spec.mesh.shape, coordinate_of(spec))


def sizes_here(spec: DTensorSpec) -> tuple[int, ...]:
    """What the other axes leave of the tensor on this rank, before the ragged cut."""
    here = coordinate_of(spec)
    return remaining_box(spec.shape, spec.placements, spec.mesh.shape, here).sizes


def range_here(spec: DTensorSpec) -> tuple[int, int]:
    """The half-open flat range that this rank holds of `sizes_here`."""
    axis, placement = ragged_in(spec)
    return placement.local_range(sizes_here(spec), coordinate_of(spec)[axis])


def same_layout(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Whether both give each rank the same elements of the same shape. ``dims`` may differ."""
    if one is other:
        return True
    if one.shape != other.shape or one.mesh != other.mesh:
        return False
    if one.placements is other.placements:
        return True
    return all(
        a.cuts_like(b) if isinstance(a, RaggedShard) and isinstance(b, RaggedShard) else a == b
        for a, b in zip(one.placements, other.placements, strict=True)
    )


def respecified_as(
    spec: DTensorSpec,
    shape: Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
) -> DTensorSpec:
    """A spec on the same mesh with another shape, placements or dtype, unchecked."""
    meta = spec.tensor_meta
    assert meta is not None, "every DTensor that exists has its meta"
    size = meta.shape if shape is None else torch.Size(shape)
    changed = TensorMeta(size, contiguous_strides(size), dtype or meta.dtype)
    return spec_of(spec.mesh, spec.placements if placements is None else tuple(placements), changed)


def spec_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], meta: TensorMeta | None
) -> DTensorSpec:
    """A spec, unchecked: a `RaggedSpec` where a placement is ragged, else torch's."""
    is_ragged = ragged_axis_of(placements) is not None
    return (RaggedSpec if is_ragged else DTensorSpec)(mesh, placements, meta)


def reshaped(spec: DTensorSpec, shape: Sequence[int]) -> DTensorSpec | None:
    """The same storage seen in another shape with as many elements.

    A ``Shard`` of another axis follows its dimension. None without a counterpart: a
    dimension of the same size, whose leading dimensions have the same product.
    """
    if tuple(shape) == tuple(spec.shape):
        return spec
    _, placement = ragged_in(spec)
    placements = list(spec.placements)
    sharded = {axis: p.dim for axis, p in enumerate(placements) if type(p) is Shard}
    for axis, dim in sharded.items():
        new_dim = _counterpart(spec.shape, dim, shape)
        if new_dim is None:
            return None
        placements[axis] = Shard(new_dim)
    if not sharded:
        unit = placement.unit_numel(spec.shape)
        return _with_cut(spec, ((n, units * unit) for n, units in placement.runs), shape)
    if placement.elements_per_unit is not None:  # the same ranges of the same parts
        dims = range(len(shape))
        split = split_factor_of(placements, spec.mesh.shape, len(shape))
        cut = RaggedShard._from_runs(dims, placement.runs, split, placement.elements_per_unit)
        return respecified_as(spec, shape, [cut if p is placement else p for p in placements])
    return _fitted(spec, placement.runs, shape, placements)


def _counterpart(shape: Sequence[int], dim: int, new_shape: Sequence[int]) -> int | None:
    """The dimension of ``new_shape`` that is ``dim`` of ``shape`` in the same storage."""
    if not math.prod(shape):  # then the sizes before say nothing
        same = tuple(shape[: dim + 1]) == tuple(new_shape[: dim + 1])
        return dim if same else None
    before = math.prod(shape[:dim])
    for new_dim, size in enumerate(new_shape):
        if size == shape[dim] and math.prod(new_shape[:new_dim]) == before:
            return new_dim
    return None


def sliced(spec: DTensorSpec, start: int, stop: int) -> DTensorSpec | None:
    """Indices [start, stop) of dimension 0.

    None where another axis has ``Shard(0)``: there the indices have other holders; and where units
    have fixed sizes: the indices are at other elements of each part.
    """
    if any(type(p) is Shard and p.dim == 0 for p in spec.placements):
        return None
    _, placement = ragged_in(spec)
    if placement.elements_per_unit is not None:
        return None
    rows, total = spec.shape[0], placement.total_units
    # In units of 1/total of a row, both the old cuts and the ends of the slice are integers.
    fine = ((count, units * rows) for count, units in placement.runs)
    runs = list(clipped(fine, start * total, stop * total))
    return _fitted(spec, runs, (stop - start, *spec.shape[1:]), list(spec.placements))


def rescaled(
    spec: DTensorSpec, kept: int, shape: Sequence[int], placements: Sequence[Placement]
) -> DTensorSpec | None:
    """Each slice of the first ``kept`` dimensions becomes a slice with another shape.

    Args:
        spec: of the tensor.
        kept: leading dimensions that stay, but for those of size 1, which may come and go.
        shape: of the result.
        placements: of the result, where the RaggedShard stands for the one that will be there.

    None where a cut goes through a slice.
    """
    _, placement = ragged_in(spec)
    numel, result_numel = math.prod(spec.shape), math.prod(shape)
    if not numel or not result_numel:
        return None
    if not any(type(p) is Shard for p in spec.placements):
        trailing = math.prod(spec.shape[kept:])
        slices = math.prod(spec.shape[:kept])
        unit = placement.unit_numel(spec.shape)
        if unit % trailing:
            return None
        scale = unit // trailing * (result_numel // slices)
        runs = ((count, units * scale) for count, units in placement.runs)
        return _with_cut(spec, runs, shape, placements)
    # Beside a Shard the units must be whole slices by themselves, at the same dimensions.
    if len(placement.dims) > kept or tuple(shape[:kept]) != tuple(spec.shape[:kept]):
        return None
    return respecified_as(spec, shape, placements)


def _with_cut(
    spec: DTensorSpec,
    runs: Iterable[tuple[int, int]],
    shape: Sequence[int],
    placements: Sequence[Placement] | None = None,
) -> DTensorSpec:
    """The spec of ``shape``, sharded by runs of elements. No other axis may have a ``Shard``."""
    axis, _ = ragged_in(spec)
    cut = RaggedShard.from_runs_of_elements(runs, shape)
    others = spec.placements if placements is None else tuple(placements)
    return respecified_as(spec, shape, (*others[:axis], cut, *others[axis + 1 :]))


def _fitted(
    spec: DTensorSpec,
    runs: Iterable[tuple[int, int]],
    shape: Sequence[int],
    placements: Sequence[Placement],
) -> DTensorSpec | None:
    """The spec of ``shape``, sharded by runs of any unit, with the fewest dims that express it."""
    axis, _ = ragged_in(spec)
    mesh_shape = spec.mesh.shape
    left = boxes_of(shape, placements, mesh_shape)
    runs = tuple(runs)
    total = RaggedShard._from_runs((), runs).total_units
    for num_dims in range(len(shape) + 1):
        if all(_divides(total, sizes, num_dims) for sizes in left):
            split = split_factor_of(placements, mesh_shape, num_dims)
            cut = RaggedShard._from_runs(range(num_dims), runs, split)
            return respecified_as(spec, shape, (*placements[:axis], cut, *placements[axis + 1 :]))
    return None


def _divides(total: int, sizes: Sequence[int], num_dims: int) -> bool:
    """Whether ``total`` units divide the first dimensions of what is left of the tensor."""
    if not math.prod(sizes):
        return True
    return total > 0 and math.prod(sizes[:num_dims]) % total == 0
