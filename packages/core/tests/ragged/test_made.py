"""What makes a RaggedTensor, and what torch's own functions say to the placements of one.

No function of torch is changed so that it makes one. Each test has what a script wrote while some
were, and what it writes now.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vescale_fsdp.ragged import (
    RaggedShard,
    RaggedTensor,
    distribute_tensor,
    from_local,
    redistribute,
)
from vescale_fsdp.testing import run_ranks

SHAPE = (8, 3)
CUT = RaggedShard((0,), (5, 3))
BOX = "shape and offset of its own.*set_model_state_dict.*zeros_like.*shard_placement_fn="


def mesh_of_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def check_zeros() -> None:
    mesh = mesh_of_two()
    like = distribute_tensor(torch.ones(SHAPE), mesh, [CUT])
    for make in (torch.distributed.tensor.zeros, torch.distributed.tensor.rand):
        with pytest.raises(NotImplementedError, match=BOX):
            make(SHAPE, device_mesh=mesh, placements=[CUT])
    made = torch.zeros_like(like)
    assert isinstance(made, RaggedTensor)
    assert torch.equal(made.full_tensor(), torch.zeros(SHAPE))
    plain = torch.distributed.tensor.zeros(SHAPE, device_mesh=mesh, placements=[Shard(0)])
    assert type(plain) is DTensor
    assert plain.to_local().shape == (4, 3)


def check_from_local() -> None:
    """Torch's takes our placements, as optimizers of other libraries call it."""
    mesh, rank = mesh_of_two(), dist.get_rank()
    local = torch.ones(3 * (5, 3)[rank])
    for options in ({}, {"run_check": True}):
        with pytest.raises(TypeError, match=r"needs .* shape of the whole .* add shape=p.shape"):
            DTensor.from_local(local, mesh, [CUT], **options)
    for made in (
        from_local(local, mesh, [CUT], shape=SHAPE),
        DTensor.from_local(
            local, mesh, [CUT], run_check=False, shape=torch.Size(SHAPE), stride=(3, 1)
        ),
    ):
        assert isinstance(made, RaggedTensor)
        assert torch.equal(made.full_tensor(), torch.ones(SHAPE))
    rows = from_local(torch.ones(4, 3), mesh, [Shard(0)], shape=SHAPE)
    assert type(rows) is DTensor
    assert torch.equal(rows.full_tensor(), torch.ones(SHAPE))


def check_distribute() -> None:
    mesh = mesh_of_two()
    whole = torch.arange(24.0).view(SHAPE)
    with pytest.raises(RuntimeError, match="unsupported placements RaggedShard"):
        torch_distribute_tensor(whole, mesh, [CUT])
    assert torch.equal(distribute_tensor(whole, mesh, [CUT]).full_tensor(), whole)


def check_redistribute() -> None:
    mesh = mesh_of_two()
    whole = torch.arange(24.0).view(SHAPE)
    parts = [whole, whole.chunk(2)[dist.get_rank()], whole / 2]
    for placement, part in zip([Replicate(), Shard(0), Partial()], parts, strict=True):
        plain = DTensor.from_local(part, mesh, [placement], run_check=False)
        with pytest.raises((AttributeError, NotImplementedError), match=r"ragged\.redistribute\("):
            plain.redistribute(placements=[CUT])
        assert torch.equal(redistribute(plain, placements=[CUT]).full_tensor(), whole)


def check_boxes() -> None:
    mesh = mesh_of_two()
    with pytest.raises(NotImplementedError, match=BOX):
        compute_local_shape_and_global_offset(SHAPE, mesh, [CUT])
    found = compute_local_shape_and_global_offset(SHAPE, mesh, [Replicate()])
    assert found == (SHAPE, (0, 0))


def check_numbers_of_plain_dtensors() -> None:
    """Torch gives each rank the number of its part; ours, that of the whole."""
    mesh, rank = mesh_of_two(), dist.get_rank()
    part = DTensor.from_local(torch.tensor(1.0 + rank), mesh, [Partial()], run_check=False)
    assert part.item() == 1.0 + rank
    assert part.full_tensor().item() == 3.0
    ours = from_local(torch.ones(3 * (5, 3)[rank]), mesh, [CUT], shape=SHAPE)
    assert ours.sum().item() == 24.0


@pytest.mark.parametrize(
    "check",
    [
        check_zeros,
        check_from_local,
        check_distribute,
        check_redistribute,
        check_boxes,
        check_numbers_of_plain_dtensors,
    ],
)
def test_torch_refuses_and_ours_does(check: object) -> None:
    run_ranks(check, 2)  # type: ignore[arg-type]
