"""``distribute_tensor`` as torch has it, with ragged placements too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import distribute_tensor
from vescale_fsdp.testing import run_ranks

from .helpers import SHAPE, assert_holds, cuts, make_mesh, random


def of_this_rank() -> torch.Tensor:
    return random(seed=dist.get_rank())


def on_one_axis() -> None:
    mesh = make_mesh()
    for cut in cuts():
        like = RaggedTensor.distribute(random(), mesh, [cut])
        assert_holds(distribute_tensor(of_this_rank(), mesh, [cut]), random(seed=0), like)
        last = dist.get_world_size() - 1
        ragged = distribute_tensor(of_this_rank(), mesh, [cut], src_data_rank=last)
        assert_holds(ragged, random(seed=last), like)
        ragged = distribute_tensor(of_this_rank(), mesh, [cut], src_data_rank=None)
        assert_holds(ragged, of_this_rank(), like)
    grows = distribute_tensor(random().requires_grad_(), mesh, [cut])
    assert grows.requires_grad
    assert grows.is_leaf
    assert distribute_tensor(random(), mesh, [cut]).requires_grad is False
    assert distribute_tensor(like, mesh, [cut]) is like
    meta = distribute_tensor(random().to("meta"), mesh, [cut])
    assert meta.is_meta
    assert meta.shape == SHAPE
    with pytest.raises(ValueError, match="redistribute"):
        distribute_tensor(like, mesh, [RaggedShard.owner(0, dist.get_world_size())])
    with pytest.raises(RuntimeError, match="leaf"):
        distribute_tensor(random().requires_grad_() * 2, mesh, [cut])
    # What is not ours is torch's.
    assert type(distribute_tensor(random(), mesh, [Shard(0)])) is not RaggedTensor


def on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    rows = RaggedShard((0,), (1, 5))
    layouts: list[list[Placement]] = [
        [Replicate(), rows],
        [rows, Replicate()],
        [rows, Shard(1)],
        [RaggedShard((0,), (1, 2), split_factor=2), Shard(0)],
    ]
    for layout in layouts:
        ragged = distribute_tensor(of_this_rank(), mesh, layout)
        assert torch.equal(ragged.full_tensor(), random(seed=0))
    with pytest.raises(ValueError, match="no Partial"):
        distribute_tensor(random(), mesh, [rows, Partial()])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_tensor_is_cut_with_the_values_of_its_source(world_size: int) -> None:
    run_ranks(on_one_axis, world_size)


def test_a_tensor_is_cut_over_two_axes() -> None:
    run_ranks(on_two_axes, 4)
