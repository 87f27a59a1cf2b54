"""``x.data``, and ``x.data = new``."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale_fsdp import RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import assert_holds, cuts, distributed, make_mesh, random
from .layouts import counted_collectives


def check_alias() -> None:
    for (x,) in distributed(random()):
        p = nn.Parameter(x)
        assert type(p.data) is RaggedTensor
        assert not p.data.requires_grad
        p.data.mul_(2)
        p.data[1] = 5.0
        p.data += 1
        torch.add(p.data, 1, out=p.data)
        expected = random() * 2
        expected[1] = 5.0
        assert_holds(p.detach(), expected + 1 + 1, like=x)
        assert p.requires_grad
        assert p.is_leaf


@pytest.mark.parametrize("world_size", [2, 3])
def test_data_shares_memory(world_size: int) -> None:
    run_ranks(check_alias, world_size)


def check_assignment() -> None:
    mesh, new, expected = make_mesh(), random(seed=3), random(seed=3)
    whole = DTensor.from_local(new, mesh, [Replicate()], run_check=False)
    share = DTensor.from_local(new / mesh.size(), mesh, [Partial()], run_check=False)
    others = [whole, whole.redistribute(placements=[Shard(1)]), share]
    for a, b in product(cuts(), cuts()):
        for given in (RaggedTensor.distribute(new, mesh, [b]), *others):
            p = nn.Parameter(RaggedTensor.distribute(random(), mesh, [a]))
            place = p._local_tensor.data_ptr()
            p.data = given
            assert p._local_tensor.data_ptr() == place  # in the shard
            torch.testing.assert_close(p.full_tensor(), expected)
            given.mul_(2)  # the values were copied
            torch.testing.assert_close(p.full_tensor(), expected)
            given.div_(2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_of_any_placement_are_written_to_the_memory_of_the_tensor(world_size: int) -> None:
    run_ranks(check_assignment, world_size)


def check_same_placements() -> None:
    for x, y in distributed(random(), random(seed=1)):
        with counted_collectives() as seen:
            x.data = y
            x.data = x.data
        assert seen == []
        assert_holds(x, random(seed=1), like=y)


def test_nothing_is_sent_where_the_placements_are_the_same() -> None:
    run_ranks(check_same_placements, 2)


def check_former() -> None:
    for x, y in distributed(random(), random(seed=1)):
        p, q = nn.Parameter(x), nn.Parameter(y)
        former, detached, flat = p.data, p.detach(), p.detach().view(-1)
        p.data = y
        assert_holds(former, random(), like=x)
        assert_holds(detached, random(), like=x)
        torch.testing.assert_close(flat.full_tensor(), random().view(-1))
        p.data.add_(1)  # not in the memory of any of these
        assert_holds(former, random(), like=x)
        p.data, q.data = q.data, former
        assert_holds(p.detach(), random(seed=1), like=x)
        assert_holds(q.detach(), random(), like=x)


def test_what_data_gave_before_keeps_the_former_values() -> None:
    run_ranks(check_former, 2)


def check_dtype() -> None:
    for (x,) in distributed(random()):
        p = nn.Parameter(x)
        p.sum().backward()  # makes what accumulates gradients
        p.grad = None
        p.data = p.data.bfloat16()
        expected = random().bfloat16()
        assert p.dtype == p._spec.tensor_meta.dtype == p.to_local().dtype == torch.bfloat16
        assert_holds(p.detach(), expected, like=x)
        (p * 2).sum().backward()
        assert p.grad.dtype == torch.bfloat16
        assert_holds(p.grad, torch.full_like(expected, 2), like=x)
        assert_holds(copy.deepcopy(p).detach(), expected, like=x)


def test_another_dtype_is_taken_over() -> None:
    run_ranks(check_dtype, 2)


def check_refused() -> None:
    mesh, whole = make_mesh(), random()
    other_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    for (x,) in distributed(whole):
        replicated = DTensor.from_local(whole, other_mesh, [Replicate()], run_check=False)
        short = RaggedTensor.distribute(whole, mesh, x.placements)[0:5]
        for new in (whole, x.to_local(), short, x.view(-1), replicated):
            with pytest.raises(ValueError, match="the data of a sharded tensor") as caught:
                x.data = new
            message = str(caught.value)
            assert f"of shape {tuple(new.shape)}" in message
            assert f"expected a DTensor of shape {tuple(x.shape)}" in message
            for way_out in ("distribute_tensor(", "full_tensor()", "unsharded("):
                assert way_out in message
        assert_holds(x, whole, like=x)


def test_what_has_no_known_layout_is_refused() -> None:
    run_ranks(check_refused, 2)
