"""The group that the tests of buffers share: five tensors, three gaps.

Over two ranks, S = 20::

    offset   0        15 16      23 24        36 37   40
    full     | a a .. a . b b b b | b b b . c .. c d . . . |
    rank     |         0          |           1            |      e has no elements
"""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_fsdp.planner import ShardLayout, TensorSpec, plan

SPECS = [
    TensorSpec("a", (3, 5), block=5),
    TensorSpec("b", (7,), block=1),
    TensorSpec("c", (2, 3, 2), block=2),
    TensorSpec("d", (), block=1),
    TensorSpec("e", (0, 4), block=1),
]
SHAPES = [torch.Size(spec.shape) for spec in SPECS]
OFFSETS = (0, 16, 24, 36, 40)
SHARD_SIZES = {1: 40, 2: 20, 3: 16}
GAPS = {1: [(15, 16), (23, 24), (37, 40)], 2: [(15, 16), (23, 24), (37, 40)]}
GAPS[3] = [*GAPS[1][:2], (37, 48)]
CPU = torch.device("cpu")


def make_layout(num_shards: int) -> ShardLayout:
    layout = plan(SPECS, num_shards, alignment=4)
    assert layout.offsets == OFFSETS
    assert layout.shard_size == SHARD_SIZES[num_shards]
    return layout


def random(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same normal numbers on every rank."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_tensors(seed: int) -> list[Tensor]:
    """One of each shape; the same on every rank."""
    return [random(shape.numel(), seed + k).view(shape) for k, shape in enumerate(SHAPES)]


def is_gap(num_shards: int) -> Tensor:
    """True where the full buffer belongs to no tensor."""
    mask = torch.zeros(num_shards * SHARD_SIZES[num_shards], dtype=torch.bool)
    for start, stop in GAPS[num_shards]:
        mask[start:stop] = True
    return mask
