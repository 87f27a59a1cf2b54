"""Redistribution between layouts drawn at random: up to four dimensions, up to three axes."""

from __future__ import annotations

import math
import random as choice
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.testing import run_ranks

from .redistribution import (
    Layout,
    Shape,
    Traffic,
    assert_laid_out,
    coordinates,
    held,
    is_ragged,
    lay_out,
    num_elements_moved,
    numbers,
    same_bits,
    whole_numbers,
)

MESHES = [(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2)]
NUM_CASES = 40


def draw_layout(draw: choice.Random, shape: Shape, sizes: Sequence[int], ragged: bool) -> Layout:
    some: list[Placement] = [Replicate(), *[Shard(dim) for dim in range(len(shape))]]
    layout = [draw.choice(some) for _ in sizes]
    if ragged:
        axis, num_dims = draw.randrange(len(sizes)), draw.randrange(len(shape) + 1)
        layout[axis] = Replicate()
        left = [held(shape, tuple(layout), sizes, at).shape for at in coordinates(sizes)]
        most = math.gcd(*(math.prod(part[:num_dims]) for part in left if math.prod(part))) or 1
        total = draw.choice([units for units in range(1, most + 1) if most % units == 0])
        cuts = [0, *sorted(draw.randint(0, total) for _ in range(sizes[axis] - 1)), total]
        before = [
            sizes[k]
            for k in range(axis + 1, len(sizes))
            if isinstance(layout[k], Shard) and layout[k].dim < num_dims
        ]
        units = [stop - start for start, stop in pairwise(cuts)]
        layout[axis] = RaggedShard(range(num_dims), units, split_factor=math.prod(before))
    return tuple(layout)


def check_random(seed: int) -> int:
    draw, num_checked = choice.Random(seed), 0
    meshes = {sizes: init_device_mesh("cpu", sizes) for sizes in MESHES}
    while num_checked < NUM_CASES:
        sizes = draw.choice(MESHES)
        mesh = meshes[sizes]
        shape = tuple(draw.randint(0, 6) for _ in range(draw.randint(0, 4)))
        source, target = (draw_layout(draw, shape, sizes, draw.random() < 0.7) for _ in range(2))
        if not (is_ragged(source) or is_ragged(target)):
            continue
        whole, weight = numbers(shape), whole_numbers(shape)
        x = lay_out(whole, mesh, source).detach().requires_grad_()
        with Traffic() as traffic:
            y = redistribute(x, placements=target, async_op=draw.random() < 0.5)
            y.to_local()
        assert_laid_out(y, whole, mesh, target)
        (grad,) = torch.autograd.grad(y, x, lay_out(weight, mesh, target))
        assert_laid_out(grad, weight, mesh, source)
        if is_ragged(target):
            assert same_bits(y.full_tensor(), whole)
            _, received = num_elements_moved(shape, source, target, sizes)
            assert traffic.num_bytes_received == 4 * received[tuple(mesh.get_coordinate())]
        num_checked += 1
    return num_checked


@pytest.mark.parametrize("seed", [0, 1])
def test_random_layouts(seed: int) -> None:
    assert run_ranks(check_random, 4, seed) == [NUM_CASES] * 4
