"""Functions of torch that make DTensors, with the placements of a sharded parameter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vescale_fsdp.ragged import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

SHAPE = (8, 3)
make = torch.distributed.tensor  # zeros, ones, ...


def check_creation() -> None:
    mesh = init_device_mesh("cpu", (2,))
    at = {"device_mesh": mesh, "placements": [RaggedShard((0,), (5, 3))]}
    rows = (5, 3)[dist.get_rank()]
    for made, whole in (
        (make.zeros(SHAPE, **at), torch.zeros(SHAPE)),
        (make.ones(*SHAPE, dtype=torch.bfloat16, **at), torch.ones(SHAPE, dtype=torch.bfloat16)),
        (make.full(SHAPE, 7, **at), torch.full(SHAPE, 7)),
    ):
        assert isinstance(made, RaggedTensor)
        assert made.to_local().shape == (3 * rows,)
        full = made.full_tensor()
        assert full.dtype == whole.dtype
        assert torch.equal(full, whole)
        assert torch.equal((made + made).full_tensor(), 2 * whole)
    empty = make.empty(SHAPE, requires_grad=True, **at)
    assert empty.requires_grad
    assert empty.is_leaf
    assert empty.to_local().shape == (3 * rows,)
    drawn = make.rand(SHAPE, **at).full_tensor()
    assert drawn.unique().numel() == 24  # each element is drawn for itself
    assert 0 <= drawn.min() < drawn.max() < 1
    assert make.randn(SHAPE, **at).full_tensor().min() < 0
    plain = make.zeros(SHAPE, device_mesh=mesh, placements=[Shard(0)])
    assert type(plain) is DTensor
    assert plain.to_local().shape == (4, 3)


def test_they_make_ragged_tensors() -> None:
    run_ranks(check_creation, 2)


def check_from_local() -> None:
    mesh, placements = init_device_mesh("cpu", (2,)), [RaggedShard((0,), (5, 3))]
    local = torch.ones(3 * (5, 3)[dist.get_rank()])
    made = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(SHAPE), stride=(3, 1)
    )
    assert isinstance(made, RaggedTensor)
    assert torch.equal(made.full_tensor(), torch.ones(SHAPE))
    for options in ({}, {"run_check": True}):
        with pytest.raises(TypeError, match=r"needs the shape of the whole .* add shape=p.shape"):
            DTensor.from_local(local, mesh, placements, **options)


def test_from_local_takes_what_dtensors_takes() -> None:
    run_ranks(check_from_local, 2)


def check_boxes() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(NotImplementedError, match="shard_placement_fn=lambda p: Shard"):
        compute_local_shape_and_global_offset(SHAPE, mesh, [RaggedShard((0,), (5, 3))])
    found = compute_local_shape_and_global_offset(SHAPE, mesh, [Replicate()])
    assert found == (SHAPE, (0, 0))


def test_a_flat_range_is_no_box() -> None:
    run_ranks(check_boxes, 2)
