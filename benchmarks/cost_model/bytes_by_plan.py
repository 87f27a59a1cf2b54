"""Bytes of a unit in one step of one rank, by the plan of each engine.

With S the shard of a unit in elements, padding included, a gather sends (m - 1) S elements from
each of m ranks, and so does a reduction. gloo's reduce-scatter is an all-reduce inside and sends
twice that; ours goes around it (docs/design/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vescale_fsdp.cli.layouts import fsdp2_shard_size
from vescale_fsdp.planner import TensorSpec, lay_out

__all__ = ["UnitBytes", "of_fsdp2", "of_ours"]

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class UnitBytes:
    """One unit.

    Attributes:
        gather, reduce: sent by a rank.
        copied_out: written when parameters are copied out of what was gathered.
        copied_in: written when gradients are copied to what is reduced.
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
    """Ours: parameters are views of what was gathered; each gradient is copied to its place.

    (Products of linear layers can be written there at once, which is not the default.)
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
    """FSDP2's: all of a unit is copied out of each gather and into each reduction, padding too."""
    shard_size = fsdp2_shard_size(specs, num_ranks)
    sent, whole = (num_ranks - 1) * shard_size, num_ranks * shard_size
    return UnitBytes(
        sent * param_bytes,
        sent * reduce_bytes * (2 if over_gloo else 1),
        whole * param_bytes,
        whole * reduce_bytes,
    )
