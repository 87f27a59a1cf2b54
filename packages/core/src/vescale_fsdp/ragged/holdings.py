"""Which part of a tensor each coordinate of a mesh holds, for any mix of placements, as boxes.

The placements of one tensor say it together. ``Shard`` placements narrow the tensor to a box,
from left to right, each dividing what those before it left (as DTensor does, chunks of equal
size and a shorter last one). Then the RaggedShard, if there is one, takes a flat range of that
box. ``Replicate`` and ``Partial`` hold all of what is left.

A holding is a list of boxes in global coordinates. Its elements lie in the rank's local tensor
box after box, each box row-major: a ``Shard`` has one box, a flat range up to 2 * ndim - 1, a
ragged start, whole slices and a ragged end, and the same again one dimension deeper. For shape
(4, 5), range [3, 18)::

    . . . A A      A: offsets (0, 3), sizes (1, 2)
    B B B B B      B: offsets (1, 0), sizes (2, 5)
    B B B B B
    C C C . .      C: offsets (3, 0), sizes (1, 3)

Pure integers: nothing here communicates or looks at data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, cast

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.ragged.placement import RaggedShard


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


class Box(NamedTuple):
    """An axis-aligned part of a tensor, with the place of its first element in the range."""

    offsets: tuple[int, ...]  # one per dimension of the tensor
    sizes: tuple[int, ...]  # one per dimension of the tensor
    start: int  # first element, counted from the start of the range

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of this part of a tensor that has all dimensions."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor

    def in_local(self, local: torch.Tensor) -> torch.Tensor:
        """The view of this part of the flat local tensor."""
        return local[self.start : self.start + math.prod(self.sizes)].view(self.sizes)

    def place_of(self, index: Sequence[slice]) -> tuple[slice, ...] | None:
        """Slices of the whole tensor as slices of this part; None if they are not within it."""
        found = []
        for each, offset, size in zip(index, self.offsets, self.sizes, strict=True):
            if each.stop is None or not offset <= each.start <= each.stop <= offset + size:
                return None
            found.append(slice(each.start - offset, each.stop - offset, each.step))
        return tuple(found)


class LocalOffset(int):
    """Where a box of this rank begins. A slice that begins with it shows what this rank holds.

    So do those of a part of the box: sums are such offsets, too. Pickles are plain numbers.
    """

    __slots__ = ()

    def __add__(self, other: int) -> LocalOffset:
        return LocalOffset(int(self) + other)

    __radd__ = __add__

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def is_local(index: object) -> bool:
    """Whether an index is a slice that begins with a `LocalOffset`."""
    return type(index) is slice and type(index.start) is LocalOffset


def flat_range_to_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cover the half-open flat range [start, stop) of a row-major tensor exactly once.

    Returns an empty list for an empty range. A scalar (shape ``()``) is one box without sizes.
    """
    assert 0 <= start <= stop <= math.prod(shape), "the range must be inside the tensor"
    boxes: list[Box] = []
    _append_boxes(boxes, tuple(shape), start, stop, (), 0)
    return boxes


def intersection(first: Box, second: Box) -> Box | None:
    """The elements that lie in both boxes; ``start`` is that of ``first``. None if there are none.

    The result is a box inside ``first``, not always contiguous there.
    """
    offsets = tuple(map(max, first.offsets, second.offsets))
    sizes = tuple(
        min(first.offsets[d] + first.sizes[d], second.offsets[d] + second.sizes[d]) - offsets[d]
        for d in range(len(offsets))
    )
    return Box(offsets, sizes, first.start) if all(size > 0 for size in sizes) else None


def _append_boxes(
    boxes: list[Box],
    shape: tuple[int, ...],
    start: int,
    stop: int,
    outer: tuple[int, ...],
    done: int,
) -> None:
    """Append the boxes of [start, stop) in the slice at ``outer``; ``done`` elements precede."""
    if start == stop:
        return
    ones = (1,) * len(outer)
    if not shape:
        boxes.append(Box(outer, ones, done))
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole slices are [first, last)
    if first > last:  # the range lies inside one slice
        base = last * inner
        _append_boxes(boxes, shape[1:], start - base, stop - base, (*outer, last), done)
        return
    head = first * inner - start
    if head:
        _append_boxes(boxes, shape[1:], inner - head, inner, (*outer, first - 1), done)
        done += head
    if last > first:
        rest = (0,) * (len(shape) - 1)
        boxes.append(Box((*outer, first, *rest), (*ones, last - first, *shape[1:]), done))
        done += (last - first) * inner
    _append_boxes(boxes, shape[1:], 0, stop - last * inner, (*outer, last), done)


class Holding(NamedTuple):
    """What one coordinate of the mesh holds of a tensor."""

    boxes: list[Box]  # in global coordinates, in the order of the local tensor
    local_shape: tuple[int, ...]  # of the local tensor: flat where a RaggedShard is among them

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return math.prod(self.local_shape)


def ragged_axis_of(placements: Sequence[Placement]) -> int | None:
    """The axis that carries the RaggedShard, if one does."""
    return next((a for a, p in enumerate(placements) if isinstance(p, RaggedShard)), None)


def remaining_box(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Box:
    """The box of a tensor of ``shape`` that the ``Shard`` placements give to a coordinate."""
    offsets, sizes = [0] * len(shape), list(shape)
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            dim = placement.dim
            chunk = -(-sizes[dim] // mesh_shape[axis])
            start = min(coordinate[axis] * chunk, sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(chunk, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes), 0)


def boxes_of(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> list[tuple[int, ...]]:
    """The different sizes of the parts that ``Shard`` placements leave, the largest one first.

    One if they divide their dimensions evenly. (5, 2) with ``Shard(0)`` over four ranks: (2, 2),
    (1, 2) and (0, 2).
    """
    extents = [[size] for size in shape]  # of each dimension, descending
    for placement, num_parts in zip(normalized(placements, len(shape)), mesh_shape, strict=True):
        if type(placement) is Shard:
            before = extents[placement.dim]
            after = {part for size in before for part in _chunks(size, num_parts)}
            extents[placement.dim] = sorted(after, reverse=True)
    return list(product(*extents))


def _chunks(size: int, num_parts: int) -> set[int]:
    chunk = -(-size // num_parts)
    starts = (0, num_parts - 1, size // chunk if chunk else 0)  # a full one, the last, the shorter
    return {min(chunk, max(size - chunk * k, 0)) for k in starts if k < num_parts}


def normalized(placements: Sequence[Placement], num_dims: int) -> tuple[Placement, ...]:
    """The placements with the dimension of each ``Shard`` counted from the front.

    Raises:
        ValueError: there is no such dimension.
    """
    found = list(placements)
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            if not -num_dims <= placement.dim < num_dims:
                raise ValueError(
                    f"axis {axis} has {placement}, but the tensor has {num_dims} dimensions"
                )
            found[axis] = Shard(placement.dim % num_dims)
    return tuple(found)


def holding_of(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Holding:
    """What the rank at ``coordinate`` holds. O(axes + dimensions)."""
    whole = remaining_box(shape, placements, mesh_shape, coordinate)
    axis = ragged_axis_of(placements)
    if axis is None:
        return Holding([whole] if math.prod(whole.sizes) else [], whole.sizes)
    placement = cast(RaggedShard, placements[axis])
    start, stop = placement.local_range(whole.sizes, coordinate[axis])
    boxes = [
        Box(tuple(map(int.__add__, whole.offsets, box.offsets)), box.sizes, box.start)
        for box in flat_range_to_boxes(whole.sizes, start, stop)
    ]
    return Holding(boxes, (stop - start,))


def split_factor_of(
    placements: Sequence[Placement], mesh_shape: Sequence[int], num_dims: int
) -> int:
    """The parts into which axes to the right of the RaggedShard split its ``num_dims`` dims."""
    axis = ragged_axis_of(placements)
    assert axis is not None, "only a RaggedShard has a split_factor"
    right = zip(placements[axis + 1 :], mesh_shape[axis + 1 :], strict=True)
    return math.prod(size for p, size in right if type(p) is Shard and p.dim < num_dims)


def check_placements(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> None:
    """Check that `normalized` placements of a ragged tensor say one thing and fit its shape.

    Raises:
        ValueError: not exactly one RaggedShard; another placement than ``Replicate``, ``Shard``
            and ``Partial`` beside it; another number of ranks than the axis has; units that do
            not divide what the other axes leave, or of fixed sizes that are not its largest part;
            a ``split_factor`` that is not so.
    """
    ragged = [axis for axis, p in enumerate(placements) if isinstance(p, RaggedShard)]
    known = (RaggedShard, Replicate, Partial)
    others = [p for p in placements if type(p) is not Shard and not isinstance(p, known)]
    if len(placements) != len(mesh_shape) or len(ragged) != 1 or others:
        raise ValueError(
            "a RaggedTensor needs one RaggedShard and otherwise Replicate, Shard or Partial, one "
            f"placement per axis of the mesh; got {tuple(placements)} for a mesh of "
            f"{len(mesh_shape)} axes"
        )
    axis = ragged[0]
    placement = cast(RaggedShard, placements[axis])
    if placement.num_shards != mesh_shape[axis]:
        raise ValueError(
            f"{placement} is for {placement.num_shards} ranks, but axis {axis} of the mesh "
            f"has {mesh_shape[axis]}"
        )
    shards = [(a, p.dim) for a, p in enumerate(placements) if type(p) is Shard]
    num_dims = len(placement.dims)
    split = split_factor_of(placements, mesh_shape, num_dims)
    if placement.split_factor != split:
        raise ValueError(
            f"{tuple(placements)}: axes to the right of axis {axis} split the dimensions "
            f"{placement.dims} into {split} parts before the ragged split, but split_factor is "
            f"{placement.split_factor}; write RaggedShard(..., split_factor={split})"
        )
    if placement.elements_per_unit is not None:
        first = (0,) * len(mesh_shape)  # it has the largest part
        largest = remaining_box(shape, placements, mesh_shape, first).sizes
        num_elements = placement.total_units * placement.elements_per_unit
        if num_elements != math.prod(largest) or num_dims != len(shape):
            raise ValueError(
                f"{placement} does not fit a tensor of shape {tuple(shape)}: units of a fixed size "
                "are of all dimensions, and together the largest part that the other axes leave, "
                f"{largest}; they have {num_elements} elements"
            )
        return
    # Only where a Shard divides a dimension of the units can what is left differ in its units.
    dividing = {a: mesh_shape[a] for a, dim in shards if dim < num_dims}
    for there in product(*(range(dividing.get(a, 1)) for a in range(len(mesh_shape)))):
        placement.unit_numel(remaining_box(shape, placements, mesh_shape, there).sizes)
