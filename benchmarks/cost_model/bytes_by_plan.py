"""Computes the bytes of a unit in one step of one rank, from the plan of each engine.

S is the shard of a unit in elements, with padding. In an all-gather or reduce-scatter each of m
ranks sends (m - 1) S elements. gloo's reduce-scatter is an all-reduce internally and sends twice as
much; ours does not use it (docs/design/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vescale_fsdp.planner import TensorSpec, lay_out
from vescale_fsdp_tune.costs.layouts import fsdp2_shard_size

__all__ = ["UnitBytes", "of_fsdp2", "of_ours"]

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class UnitBytes:
    """One unit.

    Attributes:
        gather, reduce: sent by a rank.
        copied_out: written by copies of parameters from the all-gather's output.
        copied_in: written by copies of gradients to the reduce-scatter's input.
    """

    gather: int
    reduce: int
    copied_out: int
    copied_in: int


def of_ours(
    specs: Sequence[TensorSpec],
    num_ranks: int,
    *,
    param_bytes: int = 4,
    reduce_bytes: int = 4,
) -> UnitBytes:
    """Return the bytes of our engine. Parameters are views; each gradient is copied once.

    (An option that is not the default writes gradients of linear layers without a copy.)
    """
    layout = lay_out(specs, num_ranks, alignment=ALIGNMENT_BYTES // param_bytes)
    sent = (num_ranks - 1) * layout.shard_size
    num_elements = layout.total_size - layout.padding
    return UnitBytes(sent * param_bytes, sent * reduce_bytes, 0, num_elements * reduce_bytes)


def of_fsdp2(
    specs: Sequence[TensorSpec],
    num_ranks: int,
    *,
    param_bytes: int = 4,
    reduce_bytes: int = 4,
    over_gloo: bool = False,
) -> UnitBytes:
    """Return the bytes of FSDP2, which copies whole units, with padding, in both directions."""
    shard_size = fsdp2_shard_size(specs, num_ranks)
    sent, whole = (num_ranks - 1) * shard_size, num_ranks * shard_size
    return UnitBytes(
        sent * param_bytes,
        sent * reduce_bytes * (2 if over_gloo else 1),
        whole * param_bytes,
        whole * reduce_bytes,
    )
