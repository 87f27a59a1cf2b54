"""Norms of ragged tensors, and torch's own clipping by them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import distributed, make_mesh, random

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3])
ORDERS = [0, 0.5, 1, 2, 3, math.inf, -1, -2]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


def check_norms(order: float) -> None:
    whole = random()
    whole[2, 3] = -9.0  # the largest by absolute value is negative
    expected = torch.linalg.vector_norm(whole, order)
    for (x,) in distributed(whole):
        norm = torch.linalg.vector_norm(x, order)
        assert type(norm) is DTensor
        assert norm.shape == ()
        close(norm.full_tensor(), expected)
        (norm,) = torch._foreach_norm([x], order)
        close(norm.full_tensor(), expected)


@WORLD_SIZES
@pytest.mark.parametrize("order", ORDERS)
def test_norm_is_that_of_the_whole_tensor(world_size: int, order: float) -> None:
    run_ranks(check_norms, world_size, order)


def check_other_norms() -> None:
    whole = random()
    for (x,) in distributed(whole):
        close(x.norm().full_tensor(), whole.norm())
        close(torch.linalg.norm(x).full_tensor(), whole.norm())
        wide = torch.linalg.vector_norm(x.bfloat16(), dtype=torch.float32).full_tensor()
        assert wide.dtype == torch.float32
        close(wide, whole.bfloat16().float().norm())
        with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
            torch.linalg.vector_norm(x, -math.inf)
        with pytest.raises(NotImplementedError, match="over some dimensions .dim=.0."):
            torch.linalg.vector_norm(x, dim=0)
        with pytest.raises(NotImplementedError, match="over some dimensions"):
            torch.linalg.vector_norm(x, keepdim=True)


@WORLD_SIZES
def test_norm_by_other_names_with_a_dtype_and_over_dimensions(world_size: int) -> None:
    run_ranks(check_other_norms, world_size)


def check_foreach_norm_dtype() -> None:
    whole = random(dtype=torch.bfloat16)
    for (x,) in distributed(whole):
        (norm,) = torch._foreach_norm([x], 2, dtype=torch.float32)
        assert norm.full_tensor().dtype == torch.float32
        close(norm.full_tensor(), whole.float().norm())


def test_foreach_norm_takes_a_dtype() -> None:
    run_ranks(check_foreach_norm_dtype, 2)


def check_norm_of_nothing() -> None:
    mesh = make_mesh()
    num_shards = dist.get_world_size()
    x = RaggedTensor.distribute(torch.zeros(0, 3), mesh, [RaggedShard((), [0] * num_shards)])
    for order in (1, 2, 3):
        assert torch.linalg.vector_norm(x, order).full_tensor().item() == 0.0


def test_norm_of_no_elements_is_zero() -> None:
    run_ranks(check_norm_of_nothing, 2)


def check_infinite_norm() -> None:
    for bad in (math.inf, math.nan):
        whole = random()
        whole[5, 3] = bad
        for (x,) in distributed(whole):
            assert not torch.linalg.vector_norm(x).full_tensor().isfinite()
            assert not torch.linalg.vector_norm(x, math.inf).full_tensor().isfinite()


def test_norm_is_not_finite_on_every_rank_if_an_element_is_not() -> None:
    run_ranks(check_infinite_norm, 2)
