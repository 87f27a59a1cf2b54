"""The layouts of a model's groups, and the shard sizes of other engines for the same tensors.

FSDP2 (``torch.distributed.fsdp.fully_shard``) shards each tensor separately into equal numbers of
rows of dimension 0, and pads it to a full number of rows per rank::

    shape (128, 2880) over 256 ranks: 1 row per rank, 2880 elements, 128 ranks have only padding

Megatron-FSDP v2 (its ``experimental`` layout) has one flat buffer per group, as we have. Its shard
size S is a multiple of the least common multiple L of all row sizes ``prod(shape[1:])``. A tensor
that starts at a multiple of its row is then split only between rows::

    rows of 588 and 1024 elements: L = 150,528, and S is a multiple of that

Neither keeps blocks of several rows together. Both are computed by formulas, not by their code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from vescale_fsdp.planner import (
    PADDING_LIMIT,
    Advice,
    ShardLayout,
    TensorSpec,
    advise,
    is_forced,
    lay_out,
)
from vescale_fsdp_tune.costs.model import Dtype, Group, Model, Tensor, Unit
from vescale_fsdp_tune.costs.settings import AS_THEY_ARE, Codes

ALIGNMENT_BYTES = 16  # of tensors, in the narrowest dtype that is sent; the same in the engine

BlockOf = Callable[[Tensor], int | None]
Track = Callable[[list[tuple[Unit, Group]]], Iterable[tuple[Unit, Group]]]


@dataclass(frozen=True)
class PlannedGroup:
    """A group and its layout."""

    unit: Unit
    group: Group
    layout: ShardLayout
    order: str  # the planner's option
    codes: Codes = AS_THEY_ARE

    @property
    def title(self) -> str:
        """Its name in tables and pictures."""
        return self.unit.title_of(self.group)

    @cached_property
    def advice(self) -> Advice | None:
        """The cause of padding above 5%, and options with less. None below that."""
        return advise(self.layout, order=self.order)

    @cached_property
    def is_forced(self) -> bool:
        """Whether blocks force more than 5% padding, so that there is advice."""
        return is_forced(self.layout, order=self.order)

    @property
    def is_padded_otherwise(self) -> bool:
        """Whether there is more than 5% padding that blocks do not cause."""
        return self.layout.padding_ratio > PADDING_LIMIT and not self.is_forced

    def message_bytes(self, raw_dtype: Dtype, *, reduces: bool) -> int | None:
        """Return the size of the 8-bit message from one rank to another. None: nothing is encoded.

        Args:
            raw_dtype: dtype of the tensors that are not encoded.
            reduces: for a reduce-scatter; else for an all-gather.
        """
        codings = [self.codes.of(tensor, self.group)[reduces] for tensor in self.group.tensors]
        if not any(codings):
            return None
        import torch

        from vescale_fsdp.spi import BlockCodec

        codec = BlockCodec(self.layout, codings, getattr(torch, raw_dtype.name))
        return codec.num_bytes(self.layout)

    @cached_property
    def fsdp2_shard_elements(self) -> int:
        """Elements in the shard of FSDP2 for this group."""
        return fsdp2_shard_size(self.layout.specs, self.layout.num_shards)

    @cached_property
    def megatron_shard_elements(self) -> int:
        """Elements in the shard of Megatron-FSDP v2 for this group."""
        return megatron_shard_size(self.layout.specs, self.layout.num_shards)


def lay_out_model(
    model: Model,
    num_shards: int,
    block_of: BlockOf,
    order: str = "auto",
    track: Track = iter,
    codes: Codes = AS_THEY_ARE,
) -> list[PlannedGroup]:
    """Plan each different group once, in order of first appearance.

    Args:
        model: the model to plan.
        num_shards: number of ranks that one copy of the model is sharded over.
        block_of: the block of a tensor in elements, which is not split. None: no such wish.
        order: "auto" or "definition", for the planner.
        track: wraps the iterator over the groups, for example to show a progress bar.
        codes: what is sent in 8 bits.

    Cost: up to 0.05 s for a group of hundreds of tensors.

    Raises:
        PlanError: ``block_of`` allows splits within blocks of ``codes``.
    """
    work = [(unit, group) for unit in model.units for group in unit.groups]
    planned = []
    for unit, group in track(work):
        specs = [codes.spec(tensor, group, block_of(tensor)) for tensor in group.tensors]
        alignment = ALIGNMENT_BYTES // min(2, group.dtype.itemsize)
        layout = lay_out(specs, num_shards, alignment=alignment, order=order)
        planned.append(PlannedGroup(unit, group, layout, order, codes))
    return planned


def fsdp2_shard_size(specs: Iterable[TensorSpec], num_shards: int) -> int:
    """Elements per rank, padding included, if each tensor is sharded evenly on dimension 0.

    A scalar counts one element on each rank (FSDP2 refuses scalars).
    """
    return sum(-(-spec.shape[0] // num_shards) * _row(spec) if spec.shape else 1 for spec in specs)


def megatron_shard_size(specs: Iterable[TensorSpec], num_shards: int) -> int:
    """Elements per rank, padding included, in Megatron-FSDP v2's layout.

    Tensors of at least L elements start at multiples of L, in order, and leave a hole behind them
    where L does not divide their size. The first later one whose remainder fits goes there with
    its remainder, at the end of the hole; the tensors below L, largest first, fill the rest of it,
    or follow after all others. The end is padded to a multiple of ``L * num_shards``.
    """
    specs = [spec for spec in specs if spec.numel]
    row_lcm = math.lcm(*(_row(spec) for spec in specs))
    large = [spec.numel for spec in specs if spec.numel >= row_lcm]
    small = sorted((spec for spec in specs if spec.numel < row_lcm), key=lambda s: -s.numel)
    end = 0
    while large:
        size = large.pop(0)
        remainder = size % row_lcm
        if remainder == 0:
            end += size
            continue
        hole = end + size
        end = hole_end = end + _round_up(size, row_lcm)
        for position, other in enumerate(large):
            if 0 < other % row_lcm <= row_lcm - remainder:
                hole_end = end - other % row_lcm
                end += other - other % row_lcm
                del large[position]
                break
        left = []
        for spec in small:
            start = _round_up(hole, _row(spec))
            if start + spec.numel <= hole_end:
                hole = start + spec.numel
            else:
                left.append(spec)
        small = left
    for spec in small:
        end = _round_up(end, _row(spec)) + spec.numel
    return _round_up(end, row_lcm * num_shards) // num_shards


def _row(spec: TensorSpec) -> int:
    """Elements of one index of dimension 0."""
    return math.prod(spec.shape[1:])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
