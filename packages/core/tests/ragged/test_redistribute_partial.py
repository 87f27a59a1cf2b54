"""Partial sums and their like become ragged parts: what every rank contributes, combined once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh
from .redistribution import (
    Shape,
    Traffic,
    assert_laid_out,
    combined,
    contribution,
    lay_out,
    same_bits,
    unit_vectors,
    wrap,
)

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
SHAPES: list[Shape] = [(3,), (2, 3), (2, 2, 2), (), (0, 3)]
OPERATIONS = ["sum", "avg", "min", "max", "product"]


def check_operation(reduce_op: str) -> None:
    mesh, size = make_mesh(), dist.get_world_size()
    for shape in SHAPES:
        parts = [contribution(shape, rank) for rank in range(size)]
        whole = combined(parts, reduce_op)
        source = lay_out(parts[dist.get_rank()], mesh, (Partial(reduce_op),))
        cuts = unit_vectors(shape, size)
        for cut in cuts[:: 1 + len(cuts) // 10]:
            x = redistribute(source, placements=[cut])
            assert_laid_out(x, whole, mesh, (cut,))
        assert same_bits(source.to_local(), parts[dist.get_rank()])  # it was only read


@WORLD_SIZES
@pytest.mark.parametrize("reduce_op", OPERATIONS)
def test_any_cut_of_combined_contributions(reduce_op: str, world_size: int) -> None:
    run_ranks(check_operation, world_size, reduce_op)


def check_order_of_sums() -> None:
    """Numbers whose sum depends on the order: rank 0 first, then 1, ..."""
    mesh, size = make_mesh(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.complex64):
        generator = torch.Generator().manual_seed(3)
        parts = [torch.randn(7, 3, generator=generator).to(dtype) for _ in range(size)]
        whole = combined(parts, "sum")
        for cut in (RaggedShard((0, 1), (4, 0, 11, 6)), RaggedShard.owner(2, 4)):
            x = redistribute(lay_out(parts[dist.get_rank()], mesh, (Partial(),)), placements=[cut])
            assert_laid_out(x, whole, mesh, (cut,))


def test_sums_are_in_the_order_of_ranks() -> None:
    run_ranks(check_order_of_sums, 4)


def check_dtypes() -> None:
    mesh, size = make_mesh(), dist.get_world_size()
    cut = RaggedShard((0, 1), (5, 0, 10))
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32):
        for reduce_op in ("sum", "max", "min"):
            parts = [contribution((5, 3), rank, dtype) for rank in range(size)]
            source = lay_out(parts[dist.get_rank()], mesh, (Partial(reduce_op),))
            x = redistribute(source, placements=[cut])
            assert_laid_out(x, combined(parts, reduce_op), mesh, (cut,))


def test_dtypes() -> None:
    run_ranks(check_dtypes, 3)


def check_not_finite() -> None:
    """NaN and infinity of one rank reach the result, as in torch's own reductions."""
    mesh, size = make_mesh(), dist.get_world_size()
    cut = RaggedShard((0,), (1, 4))
    for reduce_op in OPERATIONS:
        parts = [contribution((5,), rank) + 1 for rank in range(size)]
        parts[0][1], parts[1][2], parts[1][3] = float("nan"), float("nan"), float("-inf")
        source = lay_out(parts[dist.get_rank()], mesh, (Partial(reduce_op),))
        x = redistribute(source, placements=[cut]).full_tensor()
        torch.testing.assert_close(
            x, combined(parts, reduce_op), rtol=0, atol=0, equal_nan=True, msg=reduce_op
        )


def test_what_is_not_finite() -> None:
    run_ranks(check_not_finite, 2)


def check_other_kinds() -> None:
    """Norms and masked embeddings are no plain sums: refused before communication, or right."""
    mesh = make_mesh()
    table = lay_out(contribution((4, 2), 7) + 1, mesh, (Shard(0),))
    index = lay_out(torch.tensor([0, 3, 2]), mesh, (Replicate(),))

    def rows() -> DTensor:
        return torch.nn.functional.embedding(index, table)

    def norm() -> DTensor:
        return torch.linalg.vector_norm(table)

    for make, cut in [(rows, RaggedShard((0,), (1, 2))), (norm, RaggedShard.owner(1, 2))]:
        whole = make().full_tensor()
        source = make()
        assert isinstance(source.placements[0], Partial)
        with Traffic() as traffic:
            try:
                found = redistribute(source, placements=[cut])
            except NotImplementedError:
                assert traffic.calls == []
                continue
        assert_laid_out(found, whole, mesh, (cut,))


def test_partial_values_that_are_no_plain_sums() -> None:
    run_ranks(check_other_kinds, 2)


def check_bytes() -> None:
    """A rank sends each other one the part that this one keeps, and no more."""
    mesh, rank = make_mesh(), dist.get_rank()
    for dtype, num_bytes in ((torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)):
        for cut in (
            RaggedShard((0,), (1, 1, 1, 1)),
            RaggedShard((0,), (3, 0, 4, 1)),
            RaggedShard((0, 1), (1, 5, 9, 9)),
            RaggedShard.owner(1, 4),
        ):
            source = lay_out(contribution((8, 3), rank, dtype), mesh, (Partial(),))
            with Traffic() as traffic:
                x = redistribute(source, placements=[cut])
            own = x.to_local().numel()
            assert not any("reduce" in call for call in traffic.calls), traffic
            assert len(traffic.calls) == 1
            assert traffic.num_bytes_sent == (24 - own) * num_bytes, (cut, traffic)
            assert traffic.num_bytes_received == 3 * own * num_bytes, (cut, traffic)


def test_it_moves_what_a_reduce_scatter_does() -> None:
    run_ranks(check_bytes, 4)


def check_gradients() -> None:
    """As DTensor has it: the gradient of a partial tensor is replicated."""
    mesh, size, rank = make_mesh(), dist.get_world_size(), dist.get_rank()
    weight = contribution((4, 3), 50)
    parts = [contribution((4, 3), r) for r in range(size)]
    for cut in unit_vectors((4, 3), size)[::7]:
        local = parts[rank].clone().requires_grad_()
        source = wrap(local, local, mesh, (Partial(),))
        source.retain_grad()
        x = redistribute(source, placements=[cut])
        (x.to_local() * lay_out(weight, mesh, (cut,)).to_local()).sum().backward()
        assert source.grad.placements == (Replicate(),)
        assert same_bits(local.grad, weight), cut


@WORLD_SIZES
def test_gradients_are_replicated(world_size: int) -> None:
    run_ranks(check_gradients, world_size)


def check_dtensor_agrees() -> None:
    """The same graph with Shard(0) in the place of an even cut."""
    mesh, rank = make_mesh(), dist.get_rank()
    grads = []
    for target in (RaggedShard((0,), (1, 1)), Shard(0)):
        leaf = contribution((4, 3), rank).requires_grad_()
        x = redistribute(wrap(leaf, leaf, mesh, (Partial(),)), placements=[target])
        (x * x).to_local().sum().backward()
        grads.append(leaf.grad)
    assert same_bits(*grads)


def test_gradients_are_those_of_an_even_shard() -> None:
    run_ranks(check_dtensor_agrees, 2)


def check_partial_gradient() -> None:
    """Every rank's loss is its own; the gradients of the whole are summed, not sliced."""
    mesh, size, rank = make_mesh(), dist.get_world_size(), dist.get_rank()
    whole = contribution((4, 3), 9)
    weights = [contribution((4, 3), r) for r in range(size)]
    for cut in unit_vectors((4, 3), size)[::7]:
        x = RaggedTensor.distribute(whole, mesh, [cut]).requires_grad_()
        full = x.full_tensor(grad_placements=[Partial()])
        assert same_bits(full, whole)
        with Traffic() as traffic:
            (full * weights[rank]).sum().backward()
        assert not any("allreduce" in call for call in traffic.calls), traffic
        own = x.to_local().numel()
        assert traffic.num_bytes_sent == (12 - own) * 4
        assert_laid_out(x.grad, combined(weights, "sum"), mesh, (cut,))


@WORLD_SIZES
def test_a_partial_gradient_of_the_full_tensor_is_reduced(world_size: int) -> None:
    run_ranks(check_partial_gradient, world_size)
