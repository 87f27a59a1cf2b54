"""Blocks: how a tensor is divided for quantization, and where each block is.

Blocks belong to the whole tensor, so that their scales are the same numbers however it is split.
There are two kinds. *Flat*: n consecutive elements, counted from the first one; the last block may
be shorter. *Tiles*: r x c of each matrix in the last two dimensions; those at the lower and right
edges may be smaller. Vectors, and what has more than three dimensions, have flat blocks of r * c
elements instead.

There is one scale per block. The scales of a tensor have a shape of their own, the **grid**::

    tensor (6, 512), blocks of 256      grid (6, 2)       rows hold whole blocks
    tensor (6, 100), blocks of 256      grid (3,)         256, 256 and 88 elements
    tensor (6, 100), tiles (4, 32)      grid (2, 4)

A tensor may be split between blocks only. Then the scales can be split at the same places, and each
rank has those of its elements, in the same order.

Pure integers, but for the copies at the end of the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.ragged.holdings import check_placements, normalized, split_factor_of
from vescale_fsdp.ragged.placement import RaggedShard

BlockSize = int | tuple[int, int]
_Run = tuple[int, int]  # (number of consecutive ranks, elements or blocks that each of them holds)


class CutBlockError(ValueError):
    """A block is split; the message says where."""


class Region(NamedTuple):
    """Consecutive blocks in the local part of a tensor."""

    start: int  # first element
    shape: tuple[int, ...]  # (elements,), or (rows, columns) of one or more rows of tiles
    num_blocks: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The view of its elements in the flattened local part."""
        numel = math.prod(self.shape)
        part = flat if numel == len(flat) else flat.narrow(0, self.start, numel)
        return part if len(self.shape) == 1 else part.view(self.shape)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a tensor.

    Args:
        size: elements of a flat block, or (rows, columns) of a tile.
        shape: of the whole tensor.
    """

    size: BlockSize
    shape: tuple[int, ...]

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of a tile; None for flat blocks."""
        return self.size if isinstance(self.size, tuple) and len(self.shape) in (2, 3) else None

    @property
    def numel(self) -> int:
        """Elements of a block."""
        return math.prod(self.size) if isinstance(self.size, tuple) else self.size

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the scales."""
        return self._grid_of(self.shape)

    @property
    def unit(self) -> int:
        """The number of elements of which a shard boundary is a multiple; at most `numel`."""
        return min(self._unit_of(self.shape)[0], math.prod(self.shape))

    def num_blocks(self, num_elements: int) -> int:
        """Of consecutive elements that begin with a block and end with one."""
        unit, num_blocks = self._unit_of(self.shape)
        return -(-num_elements // unit) * num_blocks

    @property
    def _has_whole_rows(self) -> bool:
        """Whether flat blocks never go from one row to the next."""
        return bool(self.shape) and self.shape[-1] % self.numel == 0

    def _grid_of(self, box: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of the box that ``Shard`` axes leave to a rank."""
        if self.tile is not None:
            rows, columns = self.tile
            return (*box[:-2], -(-box[-2] // rows), -(-box[-1] // columns))
        if self._has_whole_rows:
            return (*box[:-1], box[-1] // self.numel)
        return (-(-math.prod(box) // self.numel),)

    def _unit_of(self, box: Sequence[int]) -> tuple[int, int]:
        """(Elements, blocks) of the smallest run of whole blocks that repeats in a box.

        Tiles: one row of them. If the matrices of a stack have a smaller last one: all of them.
        """
        if self.tile is None:
            return self.numel, 1
        rows, columns = self.tile
        in_row = -(-box[-1] // columns)
        if len(box) == 2 or box[-2] % rows == 0:
            return rows * box[-1], in_row
        return box[-2] * box[-1], -(-box[-2] // rows) * in_row

    def placements(
        self, placements: Sequence[Placement], mesh_shape: Sequence[int]
    ) -> tuple[Placement, ...]:
        """The placements of the scales of a tensor that has ``placements``.

        Cost: independent of the number of ranks.

        Raises:
            CutBlockError: a cut goes through a block, or the scales cannot be cut where it goes.
        """
        placements = normalized(placements, len(self.shape))
        if unknown := [p for p in placements if not _is_known(p)]:
            raise CutBlockError(f"the elements of a rank with {unknown[0]!r} are unknown")
        found: list[Placement] = [Replicate()] * len(placements)
        axes = [axis for axis, p in enumerate(placements) if not p.is_replicate()]
        axes = [axis for axis in axes if mesh_shape[axis] > 1]
        if math.prod(self.shape) == 0 or not axes:
            return tuple(found)
        if self.tile is None and not self._has_whole_rows:
            if len(axes) > 1:
                raise CutBlockError(
                    f"{len(axes)} axes shard it, but rows of {self.shape[-1]} elements do not hold "
                    "whole blocks"
                )
            found[axes[0]] = self._flat_cut(placements[axes[0]], mesh_shape[axes[0]])
            return tuple(found)
        boxes = {self.shape}
        for axis in axes:
            placement = placements[axis]
            if isinstance(placement, Shard):
                boxes = self._parts(boxes, placement.dim, mesh_shape[axis])
                found[axis] = placement
        for axis in axes:
            placement = placements[axis]
            if isinstance(placement, RaggedShard):
                ragged = self._ragged_in(boxes, placement)
                found[axis] = ragged
                split = split_factor_of(found, mesh_shape, len(ragged.dims))
                found[axis] = ragged.with_split_factor(split)
                check_placements(self.grid, found, mesh_shape)
        return tuple(found)

    def _flat_cut(self, placement: Placement, num_ranks: int) -> RaggedShard:
        """Blocks that go from row to row, on one axis: each rank has a flat range of them."""
        if isinstance(placement, RaggedShard):
            return self._ragged_in({self.shape}, placement)
        if placement != Shard(0):
            raise CutBlockError(
                f"{placement!r} cuts rows of {self.shape[-1]} elements, which do not hold whole "
                "blocks"
            )
        row = math.prod(self.shape[1:])
        chunk = -(-self.shape[0] // num_ranks)
        num_whole, rest = divmod(self.shape[0], chunk)
        runs = [(num_whole, chunk * row)]
        if num_whole < num_ranks:
            runs += [(1, rest * row), (num_ranks - num_whole - 1, 0)]
        blocks = self._in_blocks(runs, self.shape)
        return RaggedShard.from_runs_of_elements(blocks, self.grid)

    def _ragged_in(self, boxes: set[tuple[int, ...]], placement: RaggedShard) -> RaggedShard:
        """The RaggedShard of the scales, if ``placement`` splits each of the boxes."""
        found = []
        for box in sorted(boxes):
            runs, grid = self._in_blocks(placement.runs_in(box), box), self._grid_of(box)
            found.append((RaggedShard.from_runs_of_elements(runs, grid), grid))
        if placement.elements_per_unit is None:
            cut = max((each for each, _ in found), key=lambda each: len(each.dims))
            alike = all(each.runs == cut.runs for each, _ in found)
        else:  # the split of the largest grid must be that of the others, as far as they go
            largest, grid = max(found, key=lambda each: math.prod(each[1]))
            cut = largest.fixed_in(grid)
            alike = all(
                RaggedShard.from_runs_of_elements(cut.runs_in(grid), grid).runs == each.runs
                for each, grid in found
            )
        if not alike:
            raise CutBlockError("other axes leave parts whose blocks are not split alike")
        return cut

    def _in_blocks(self, runs: list[_Run], box: Sequence[int]) -> list[_Run]:
        """Runs of elements as runs of blocks."""
        unit, num_blocks = self._unit_of(box)
        start, numel = 0, math.prod(box)
        for count, elements in runs:
            stop = start + count * elements
            if elements % unit and (count > 1 or stop < numel):
                raise CutBlockError(
                    f"a split after element {start + elements} is not at a multiple of {unit}"
                )
            start = stop
        return [(count, -(-elements // unit) * num_blocks) for count, elements in runs if count]

    def _parts(self, boxes: set[tuple[int, ...]], dim: int, num_parts: int) -> set[tuple[int, ...]]:
        """The boxes that a ``Shard`` makes of boxes, without empty ones.

        The grid is split at the same places: where b divides ceil(n / p), the p parts of n blocks
        of b are ceil(n / b / p) blocks long.
        """
        needed = self._extent_along(dim)
        found = set()
        for box in boxes:
            chunk = -(-box[dim] // num_parts)
            if chunk < box[dim] and chunk % needed:
                raise CutBlockError(
                    f"dimension {dim} is split into {chunk} of {box[dim]}, which is not a multiple "
                    f"of {needed}"
                )
            for extent in {chunk, box[dim] % chunk} - {0}:
                found.add((*box[:dim], extent, *box[dim + 1 :]))
        return found

    def _extent_along(self, dim: int) -> int:
        """The size of which the parts along a dimension are a multiple."""
        from_end = len(self.shape) - dim
        if self.tile is not None:
            return self.tile[2 - from_end] if from_end <= 2 else 1
        assert self._has_whole_rows, "others are sharded flat"
        return self.numel if from_end == 1 else 1

    def regions(self, box: Sequence[int], num_elements: int, at_most: int) -> list[Region]:
        """The blocks of a local part, in order.

        Args:
            box: the shape of the part that axes with a ``Shard`` leave to this rank.
            num_elements: of the local part: a range of the box.
            at_most: elements of a region, if a row of tiles is not more.
        """
        found: list[Region] = []
        if num_elements == 0:
            return found
        if self.tile is None:
            step = max(at_most // self.numel, 1) * self.numel
            for start in range(0, num_elements, step):
                extent = min(step, num_elements - start)
                found.append(Region(start, (extent,), -(-extent // self.numel)))
            return found
        columns = box[-1]
        in_row = -(-columns // self.tile[1])
        goes_on = self._unit_of(box)[0] == self.tile[0] * columns  # from matrix to matrix
        rows = num_elements // columns if goes_on else box[-2]
        step = max(at_most // columns // self.tile[0], 1) * self.tile[0]
        for matrix in range(0, num_elements, rows * columns):
            for row in range(0, rows, step):
                extent = min(step, rows - row)
                num_blocks = -(-extent // self.tile[0]) * in_row
                found.append(Region(matrix + row * columns, (extent, columns), num_blocks))
        return found

    def pack(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the view of a region into ``out`` [blocks, elements]; zeros where it has none."""
        if part.dim() == 1:
            flat = out.view(-1)
            flat[: part.numel()].copy_(part)
            flat[part.numel() :].zero_()
            return
        rows, columns = self._tile_of_region()
        padded = F.pad(part, (0, -part.shape[1] % columns, 0, -part.shape[0] % rows))
        tiles = padded.view(padded.shape[0] // rows, rows, -1, columns).transpose(1, 2)
        out.view(tiles.shape).copy_(tiles)

    def unpack(self, blocks: torch.Tensor, part: torch.Tensor) -> None:
        """Copy ``blocks`` [blocks, elements] into the view of a region."""
        if part.dim() == 1:
            part.copy_(blocks.view(-1)[: part.numel()])
            return
        rows, columns = self._tile_of_region()
        tiles = blocks.view(-(-part.shape[0] // rows), -1, rows, columns).transpose(1, 2)
        part.copy_(tiles.flatten(0, 1).flatten(1)[: part.shape[0], : part.shape[1]])

    def _tile_of_region(self) -> tuple[int, int]:
        assert self.tile is not None, "only regions of tiles have two dimensions"
        return self.tile


def _is_known(placement: Placement) -> bool:
    return type(placement) is Shard or isinstance(placement, RaggedShard | Replicate)
