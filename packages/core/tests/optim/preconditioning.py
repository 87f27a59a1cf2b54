"""Scenarios for Shampoo and SOAP, inside a rank: sharded parameters beside plain ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from vescale_fsdp import RaggedShard, RaggedTensor

Make = Callable[[Any], Optimizer]
Cut = Callable[[Sequence[int]], Placement]

SHAPES = [(6, 10), (7,), (5, 3, 4), (1, 9), (12, 5), (2, 2, 4, 6), (), (4, 0)]


def random_cut(generator: random.Random, num_ranks: int | None = None) -> Cut:
    """Cuts anywhere, on all ranks if not on so many; shards may be empty."""

    def cut(shape: Sequence[int]) -> RaggedShard:
        return _cut(generator, shape, range(math.prod(shape) + 1), num_ranks)

    return cut


def random_row_cut(generator: random.Random, block_size: int) -> Cut:
    """Cuts between rows of blocks of each matrix, and anywhere in a vector."""

    def cut(shape: Sequence[int]) -> RaggedShard:
        numel = math.prod(shape)
        if len(shape) < 2 or not numel:
            return _cut(generator, shape, range(numel + 1), None)
        height, cols = shape[-2:]
        rows = range(numel // cols + 1)
        legal = [row * cols for row in rows if row % height % block_size == 0]
        return _cut(generator, shape, legal, None)

    return cut


def _cut(
    generator: random.Random, shape: Sequence[int], legal: Sequence[int], num_ranks: int | None
) -> RaggedShard:
    num_ranks, numel = num_ranks or dist.get_world_size(), math.prod(shape)
    cuts = [0, *sorted(generator.choice(legal) for _ in range(num_ranks - 1)), numel]
    counts = [stop - start for start, stop in pairwise(cuts)]
    if not numel:
        return RaggedShard((), counts)
    return RaggedShard.from_runs_of_elements([(1, count) for count in counts], shape)


def randn(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def sharded(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    if any(isinstance(p, RaggedShard) for p in placements):
        return RaggedTensor.distribute(tensor, mesh, placements)
    return torch.distributed.tensor.distribute_tensor(tensor, mesh, placements, src_data_rank=None)


class Twins:
    """The same parameters sharded and plain, each with its optimizer."""

    def __init__(
        self,
        make: Make,
        shapes: Sequence[Sequence[int]],
        mesh: DeviceMesh,
        placements: Callable[[Sequence[int]], Sequence[Placement]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shapes, self.mesh, self.dtype = shapes, mesh, dtype
        values = [randn(index, shape, dtype) for index, shape in enumerate(shapes)]
        self.plain = [nn.Parameter(value.clone()) for value in values]
        self.params = [
            nn.Parameter(sharded(value, mesh, placements(value.shape))) for value in values
        ]
        self.optimizer, self.plain_optimizer = make(self.params), make(self.plain)

    def gradients(self, step: int, skip: Iterable[int] = ()) -> None:
        for index, (param, plain) in enumerate(zip(self.params, self.plain, strict=True)):
            if index in skip:
                param.grad = plain.grad = None
                continue
            plain.grad = randn(1000 * step + index, plain.shape, self.dtype)
            assert isinstance(param, DTensor)
            param.grad = sharded(plain.grad, self.mesh, param.placements)

    def step(self, step: int, skip: Iterable[int] = ()) -> None:
        self.gradients(step, skip)
        self.optimizer.step()
        self.plain_optimizer.step()

    def check(self, where: str = "") -> None:
        """Parameters and states are the same bits."""
        for index, (param, plain) in enumerate(zip(self.params, self.plain, strict=True)):
            assert_same(param, plain, f"{where} parameter {index}")
            states = self.optimizer.state[param], self.plain_optimizer.state[plain]
            assert states[0].keys() == states[1].keys()
            for key in states[0]:
                assert_same(states[0][key], states[1][key], f"{where} {key} of {index}")


def assert_same(found: Tensor, expected: Tensor, what: str) -> None:
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    assert whole.dtype == expected.dtype, f"{what}: {whole.dtype}, expected {expected.dtype}"
    assert torch.equal(whole, expected), (
        f"{what}: {(whole != expected).sum()} of {whole.numel()} differ"
    )


def on_line(cut: Cut) -> Callable[[Sequence[int]], Sequence[Placement]]:
    return lambda shape: [cut(shape)]


def on_replicas(cut: Cut) -> Callable[[Sequence[int]], Sequence[Placement]]:
    return lambda shape: [Replicate(), cut(shape)]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))
