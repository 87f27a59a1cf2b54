"""The layouts of a model's groups, and the shard sizes of other engines for the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from vescale_fsdp.cli.model import Dtype, Group, Model, Unit
from vescale_fsdp.cli.settings import AS_THEY_ARE, BlockRules, Codes
from vescale_fsdp.planner import Advice, ShardLayout, advise, lay_out
from vescale_fsdp.planner.advice import PADDING_LIMIT, is_forced
from vescale_fsdp.planner.peers import fsdp2_shard_size, megatron_shard_size

ALIGNMENT_BYTES = 16  # of tensors, in the narrowest dtype that is sent; the same in the engine

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

        from vescale_fsdp.dbuffer import BlockCodec

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
    rules: BlockRules,
    order: str,
    track: Track = iter,
    codes: Codes = AS_THEY_ARE,
) -> list[PlannedGroup]:
    """Plan each different group once, in order of first appearance.

    Args:
        model: the model to plan.
        num_shards: number of ranks that one copy of the model is sharded over.
        rules: give the blocks.
        order: "auto" or "definition", for the planner.
        track: wraps the iterator over the groups, for example to show a progress bar.
        codes: what is sent in 8 bits.

    Cost: up to 0.05 s for a group of hundreds of tensors.

    Raises:
        InputError: ``rules`` allow splits within blocks of ``codes``.
    """
    work = [(unit, group) for unit in model.units for group in unit.groups]
    planned = []
    for unit, group in track(work):
        specs = [codes.spec(tensor, group, rules.block(tensor)) for tensor in group.tensors]
        alignment = ALIGNMENT_BYTES // min(2, group.dtype.itemsize)
        layout = lay_out(specs, num_shards, alignment=alignment, order=order)
        planned.append(PlannedGroup(unit, group, layout, order, codes))
    return planned
