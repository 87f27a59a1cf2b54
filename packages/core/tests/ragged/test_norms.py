"""Norms of ragged tensors, and torch's own clipping by them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import ReplicatedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import distributed, make_mesh, random
from .layouts import counted_collectives

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3])
ORDERS = [0, 0.5, 1, 2, 3, math.inf, -1, -3, -math.inf]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=5e-6, atol=0)


def check_norms() -> None:
    whole = random()
    whole[2, 3] = -9.0  # the largest by absolute value is negative
    for order in ORDERS:
        expected = torch.linalg.vector_norm(whole, order)
        for (x,) in distributed(whole):
            norm = torch.linalg.vector_norm(x, order)
            assert type(norm) is ReplicatedTensor
            assert norm.shape == ()
            close(norm.full_tensor(), expected)
            (norm,) = torch._foreach_norm([x], order)
            close(norm.full_tensor(), expected)


@WORLD_SIZES
def test_norm_of_any_order_is_that_of_the_whole_tensor(world_size: int) -> None:
    run_ranks(check_norms, world_size)


def check_other_norms() -> None:
    whole = random()
    for (x,) in distributed(whole):
        close(x.norm().full_tensor(), whole.norm())
        close(torch.linalg.norm(x).full_tensor(), whole.norm())
        wide = torch.linalg.vector_norm(x.bfloat16(), dtype=torch.float32).full_tensor()
        assert wide.dtype == torch.float32
        close(wide, whole.bfloat16().float().norm())
        close(torch.linalg.norm(x, dim=0).full_tensor(), torch.linalg.norm(whole, dim=0))
        close(x.norm(3, keepdim=True).full_tensor(), whole.norm(3, keepdim=True))


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


def check_infinite_norms_of_a_list() -> None:
    """Tensors of one mesh share an all-reduce; those of another dtype take one of their own."""
    wholes = [random(), random(seed=1), random(seed=2, dtype=torch.float64)]
    for xs in distributed(*wholes):
        with counted_collectives() as collectives:
            norms = torch._foreach_norm(xs, math.inf)
        assert collectives == ["all_reduce"] * 2
        for norm, whole in zip(norms, wholes, strict=True):
            assert norm.placements == (Replicate(),)
            close(norm.full_tensor(), whole.norm(math.inf))


def test_infinite_norms_of_a_list_share_an_all_reduce() -> None:
    run_ranks(check_infinite_norms_of_a_list, 2)


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


# --- torch.nn.utils.clip_grad_norm_ ---------------------------------------------------------------


def check_clip_by_all_orders() -> None:
    for order in (1, 2, 3, math.inf):
        check_clip(0.5, order)


def check_clip(max_norm: float, order: float) -> None:
    wholes = [random(seed=1), random(seed=2), random(seed=3)]
    dense = [nn.Parameter(torch.zeros_like(whole)) for whole in wholes]
    for parameter, whole in zip(dense, wholes, strict=True):
        parameter.grad = whole.clone()
    expected = nn.utils.clip_grad_norm_(dense, max_norm, norm_type=order)
    for foreach in (None, True, False):
        for grads in zip(*(distributed(whole) for whole in wholes), strict=True):
            parameters = [nn.Parameter(torch.zeros_like(grad)) for (grad,) in grads]
            for parameter, (grad,) in zip(parameters, grads, strict=True):
                parameter.grad = grad
            norm = nn.utils.clip_grad_norm_(
                parameters, max_norm, norm_type=order, error_if_nonfinite=True, foreach=foreach
            )
            close(norm.full_tensor(), expected)
            for parameter, plain in zip(parameters, dense, strict=True):
                assert type(parameter.grad) is RaggedTensor
                clipped = parameter.grad.full_tensor()
                torch.testing.assert_close(clipped, plain.grad, rtol=5e-6, atol=0)


@WORLD_SIZES
def test_torch_clips_by_the_norm_of_all_ranks(world_size: int) -> None:
    run_ranks(check_clip_by_all_orders, world_size)


def test_torch_does_not_scale_what_is_below_the_limit() -> None:
    run_ranks(check_clip, 2, 1000.0, 2)


def check_clip_of_different_cuts() -> None:
    """Each gradient is cut in another way; some ranks hold nothing of some."""
    grads = [x for (x,) in distributed(random())]
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    close(norm.full_tensor(), random().norm() * math.sqrt(len(grads)))
    close(grads[0].full_tensor(), random() / (random().norm() * math.sqrt(len(grads)) + 1e-6))


@WORLD_SIZES
def test_torch_clips_gradients_that_are_cut_differently(world_size: int) -> None:
    run_ranks(check_clip_of_different_cuts, world_size)
