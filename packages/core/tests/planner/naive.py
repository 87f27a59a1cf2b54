"""The rule of the planner, written down as plainly as it goes, to test the planner against.

No theory: every shard size from zero up, every start of every tensor, every cut. Cost grows
with all three, so keep it to tens of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from vescale_fsdp.planner import TensorSpec


def is_legal_start(start: int, numel: int, block: int, shard_size: int) -> bool:
    """Whether every cut strictly inside ``[start, start + numel)`` is on a block boundary."""
    cuts = range(0, start + numel, shard_size) if shard_size else ()
    return all((cut - start) % block == 0 for cut in cuts if cut > start)


def naive_fits(
    specs: Sequence[TensorSpec], num_shards: int, shard_size: int, alignment: int
) -> bool:
    """Whether any choice of starts, in the order of ``specs``, is legal at this shard size."""
    total = num_shards * shard_size
    ends = {0}  # where the tensors so far can end
    for spec in specs:
        ends = {
            start + spec.numel
            for end in ends
            for start in range(end, total - spec.numel + 1)
            if start % alignment == 0
            if is_legal_start(start, spec.numel, spec.block, shard_size)
        }
    return bool(ends)


def least_shard_size(specs: Sequence[TensorSpec], num_shards: int, alignment: int = 1) -> int:
    """The least shard size that fits, by trying all multiples of ``alignment`` from 0 up."""
    shard_size = 0
    while not naive_fits(specs, num_shards, shard_size, alignment):
        shard_size += alignment
    return shard_size


def least_in_any_order(specs: Sequence[TensorSpec], num_shards: int, alignment: int = 1) -> int:
    """The least shard size over all orders of ``specs``, by trying each."""
    shard_size = 0
    while not any(naive_fits(p, num_shards, shard_size, alignment) for p in permutations(specs)):
        shard_size += alignment
    return shard_size
