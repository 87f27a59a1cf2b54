"""What other systems pay for the same group, to set beside a plan. Formulas, not their code.

FSDP2 (``torch.distributed.fsdp.fully_shard``) cuts every tensor by itself into equal numbers of
rows of dimension 0, and pads each to a full number of rows per rank::

    shape (128, 2880) over 256 ranks: 1 row per rank, 2880 elements, 128 ranks hold padding

Megatron-FSDP v2 (its ``experimental`` layout) has one flat buffer for a group, as we have, and
lets S be a multiple of the least common multiple L of all rows, a row being ``prod(shape[1:])``.
Then every tensor that starts at a multiple of its row is cut between rows::

    rows of 588 and 1024 elements: L = 150,528, and S is a multiple of that

Both count no blocks: rows of dimension 0 are what they keep together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from vescale_fsdp.planner.layout import TensorSpec


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
