"""Gradients through redistribution are those of the dense tensor, in the layout of the source."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh
from .redistribution import (
    Layout,
    Traffic,
    assert_laid_out,
    lay_out,
    part_of,
    same_bits,
    unit_vectors,
    whole_numbers,
    wrap,
)

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def layouts(shape: tuple[int, ...]) -> list[Layout]:
    cuts = unit_vectors(shape, dist.get_world_size())
    sample: list[Layout] = [(cut,) for cut in cuts[:: 1 + len(cuts) // 4]]
    return [*sample, (Replicate(),), *[(Shard(dim),) for dim in range(len(shape))]]


def has_ragged(*pair: Layout) -> bool:
    return any(isinstance(layout[0], RaggedShard) for layout in pair)


def check_every_way() -> None:
    """Of the sum over ranks of weight * part; along a replicated tensor all have the same one."""
    mesh = make_mesh()
    for shape in [(4, 2), (3,), ()]:
        whole, weight = whole_numbers(shape, 1), whole_numbers(shape, 2)
        for source in layouts(shape):
            for target in layouts(shape):
                if not has_ragged(source, target):
                    continue
                x = lay_out(whole, mesh, source).detach().requires_grad_()
                y = redistribute(x, placements=target)
                assert y.requires_grad
                (y.to_local() * part_of(weight, mesh, target)).sum().backward()
                assert_laid_out(x.grad, weight, mesh, source)


@WORLD_SIZES
def test_gradient_of_a_weighted_sum(world_size: int) -> None:
    run_ranks(check_every_way, world_size)


def check_chain() -> None:
    """Through five layouts, with operators in between, twice backward into the same leaf."""
    mesh = make_mesh()
    whole, weight = whole_numbers((6, 2), 1), whole_numbers((6, 2), 2)
    first, second = RaggedShard((0,), (1, 3, 2)), RaggedShard((0, 1), (0, 5, 7))
    x = lay_out(whole, mesh, (first,)).detach().requires_grad_()
    for time in (1, 2):
        y = x * 2
        y = redistribute(y, placements=[second]) * 3
        y = redistribute(y, placements=[Shard(0)]) + 1
        y = redistribute(y, placements=[first]) * x
        y = redistribute(y, placements=[Replicate()])
        (y.to_local() * weight).sum().backward()
        # y = (6 x + 1) x, so its derivative is 12 x + 1.
        assert_laid_out(x.grad, time * (12 * whole + 1) * weight, mesh, (first,))


def test_a_chain_of_redistributions_and_operators() -> None:
    run_ranks(check_chain, 3)


def check_full_tensor() -> None:
    mesh = make_mesh()
    whole, weight = whole_numbers((4, 3), 1), whole_numbers((4, 3), 2)
    for cut in unit_vectors((4, 3), dist.get_world_size())[::9]:
        x = lay_out(whole, mesh, (cut,)).detach().requires_grad_()
        full = x.full_tensor()
        assert type(full) is Tensor
        (full * full * weight).sum().backward()
        assert_laid_out(x.grad, 2 * whole * weight, mesh, (cut,))
        with torch.no_grad():
            assert not x.full_tensor().requires_grad
            assert not redistribute(x, placements=[Replicate()]).requires_grad


@WORLD_SIZES
def test_gradient_of_the_full_tensor(world_size: int) -> None:
    run_ranks(check_full_tensor, world_size)


def check_local_ends() -> None:
    """From this rank's flat part, through a redistribution, to that rank's."""
    mesh = make_mesh()
    whole, weight = whole_numbers((4, 3), 1), whole_numbers((4, 3), 2)
    cut, other = RaggedShard((0,), (1, 0, 3)), RaggedShard((0, 1), (6, 5, 1))
    for target in [(other,), (Shard(1),), (Replicate(),)]:
        local = part_of(whole, mesh, (cut,)).requires_grad_()
        y = redistribute(wrap(local, whole, mesh, (cut,)), placements=target)
        (y.to_local() * part_of(weight, mesh, target)).sum().backward()
        assert type(local.grad) is Tensor
        assert same_bits(local.grad, part_of(weight, mesh, (cut,)))
    for source in [(Shard(0),), (Shard(1),), (Replicate(),)]:
        local = part_of(whole, mesh, source).requires_grad_()
        y = redistribute(wrap(local, whole, mesh, source), placements=[cut])
        (y.to_local() * part_of(weight, mesh, (cut,))).sum().backward()
        assert same_bits(local.grad, part_of(weight, mesh, source))


def test_from_local_and_to_local_are_differentiable() -> None:
    run_ranks(check_local_ends, 3)


def check_gradient_of_another_layout() -> None:
    """A gradient may arrive as any layout of the target's values: here as a plain one."""
    mesh = make_mesh()
    whole, weight = whole_numbers((4, 3), 1), whole_numbers((4, 3), 2)
    cut = RaggedShard((0,), (1, 3))
    for given in [(Shard(0),), (Replicate(),), (RaggedShard((0, 1), (7, 5)),)]:
        for target in [(RaggedShard((0,), (3, 1)),), (Replicate(),), (Shard(1),)]:
            x = lay_out(whole, mesh, (cut,)).detach().requires_grad_()
            y = redistribute(x, placements=target)
            (grad,) = torch.autograd.grad(y, x, lay_out(weight, mesh, given))
            assert_laid_out(grad, weight, mesh, (cut,))


def test_gradients_come_in_any_layout() -> None:
    run_ranks(check_gradient_of_another_layout, 2)


def check_linear() -> None:
    """A layer whose weight is ragged at rest and replicated in use, as data parallelism has it."""
    mesh = make_mesh()
    weight, inputs = whole_numbers((4, 3), 1), whole_numbers((5, 3), 2)
    dense = weight.clone().requires_grad_()
    (inputs @ dense.t()).pow(2).sum().backward()
    for cut in (RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (5, 7)), RaggedShard.owner(1, 2)):
        x = RaggedTensor.distribute(weight, mesh, [cut]).requires_grad_()
        replicated = redistribute(x, placements=[Replicate()])
        output = wrap(inputs, inputs, mesh, (Replicate(),)) @ replicated.t()
        assert type(output) is DTensor
        output.pow(2).sum().to_local().backward()
        assert_laid_out(x.grad, dense.grad, mesh, (cut,))


def test_a_linear_layer_of_a_ragged_weight() -> None:
    run_ranks(check_linear, 2)


def check_batch() -> None:
    """Data parallelism: the batch is sharded, so the weight's gradient is a partial sum."""
    mesh = make_mesh()
    weight, inputs = whole_numbers((4, 3), 1), whole_numbers((6, 3), 2)
    dense = weight.clone().requires_grad_()
    (inputs @ dense.t()).pow(2).sum().backward()
    for cut in (RaggedShard((0,), (1, 2, 1)), RaggedShard((0, 1), (5, 0, 7))):
        x = RaggedTensor.distribute(weight, mesh, [cut]).requires_grad_()
        replicated = redistribute(x, placements=[Replicate()])
        output = lay_out(inputs, mesh, (Shard(0),)) @ replicated.t()
        assert output.placements == (Shard(0),)
        loss = output.to_local().pow(2).sum()
        with Traffic() as traffic:
            loss.backward()
        assert_laid_out(x.grad, dense.grad, mesh, (cut,))
        # Each rank sends the others their parts of its sum.
        assert traffic.num_bytes_sent == 4 * (12 - x.to_local().numel()), traffic
        assert not any("reduce" in call for call in traffic.calls)


def test_a_gradient_that_is_a_partial_sum_is_scattered() -> None:
    run_ranks(check_batch, 3)


def check_second_derivative() -> None:
    """Of weight * x^3: 3 weight x^2, whose sum has the derivative 6 weight x."""
    mesh = make_mesh()
    whole, weight = whole_numbers((4, 3), 1), whole_numbers((4, 3), 2)
    cut = RaggedShard((0,), (1, 3))
    for target in [(RaggedShard((0, 1), (7, 5)),), (Replicate(),), (Shard(1),)]:
        x = lay_out(whole, mesh, (cut,)).detach().requires_grad_()
        y = redistribute(x, placements=target).to_local()
        loss = (y * y * y * part_of(weight, mesh, target)).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        assert_laid_out(first, 3 * weight * whole * whole, mesh, (cut,))
        (second,) = torch.autograd.grad(first.to_local().sum(), x)
        assert_laid_out(second, 6 * weight * whole, mesh, (cut,))


def test_second_derivatives() -> None:
    run_ranks(check_second_derivative, 2)


def check_dtypes() -> None:
    """`forward_dtype` travels; the gradient comes back in the dtype of the source."""
    mesh, whole, weight = make_mesh(), whole_numbers((4, 3), 1), whole_numbers((4, 3), 2)
    cut, other = RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (7, 5))
    for target in [(other,), (Replicate(),), (Shard(0),)]:
        x = lay_out(whole, mesh, (cut,)).detach().requires_grad_()
        y = redistribute(x, placements=target, forward_dtype=torch.bfloat16)
        assert_laid_out(y, whole.bfloat16(), mesh, target)
        (y.to_local() * part_of(weight, mesh, target)).sum().backward()
        assert_laid_out(x.grad, weight, mesh, (cut,))
        x = lay_out(whole, mesh, (cut,)).detach().requires_grad_()
        y = redistribute(x, placements=target, backward_dtype=torch.bfloat16)
        assert_laid_out(y, whole, mesh, target)
        (y.to_local() * part_of(weight, mesh, target)).sum().backward()
        assert_laid_out(x.grad, weight, mesh, (cut,))


def test_dtypes_of_forward_and_backward() -> None:
    run_ranks(check_dtypes, 2)


def check_no_gradient() -> None:
    mesh, whole = make_mesh(), whole_numbers((4, 3))
    cut, other = RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (7, 5))
    for source in [(cut,), (Replicate(),), (Shard(0),)]:
        assert not redistribute(lay_out(whole, mesh, source), placements=[other]).requires_grad
    integers = lay_out(whole.long(), mesh, (cut,))
    assert not redistribute(integers, placements=[Replicate()]).requires_grad


def test_what_needs_no_gradient_gets_none() -> None:
    run_ranks(check_no_gradient, 2)
