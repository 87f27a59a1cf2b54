"""What a reduction gives is written to, and read into plain tensors, as that of a plain tensor."""

from __future__ import annotations

import copy
import io
import random as chance
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import ReplicatedTensor, wrap_replicated
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh, random
from .layouts import counted_collectives, whole_of

SHAPE = (6, 4)


def sharded(whole: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """The tensor as each row of the table has it: ragged in three ways, and replicated."""
    n = mesh.size()
    parts = [12, *[0] * (n - 1)]
    parts[-1] += 24 - sum(parts)
    plain = DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
    cuts = [RaggedShard.owner(n - 1, n), RaggedShard((0, 1), tuple(parts))]
    if 6 % n == 0:
        cuts.append(RaggedShard((0,), (6 // n,) * n))
    ragged: list[Tensor] = [RaggedTensor.distribute(whole, mesh, [cut]) for cut in cuts]
    return [*ragged, wrap_replicated(plain.to_local(), plain._spec)]


# What optimizers of other libraries do with norms and sums: LAMB, AdamP, NovoGrad, Prodigy ...


def _set(x: Tensor) -> Tensor:
    found = torch.zeros(3)
    found[1] = x.norm()
    found[2:].lerp_(x.sum(), 0.3)
    return found


def _through_a_view(x: Tensor) -> Tensor:
    sums = x.sum(0)
    sums[0].mul_(5)
    sums[1:3].add_(1)
    return sums


def _through_detach(x: Tensor) -> Tensor:
    total = x.sum()
    total.detach().mul_(2)
    return total


def _foreach(x: Tensor) -> Tensor:
    norms = torch._foreach_norm([x, x * 2])
    torch._foreach_maximum_(norms, 0.5)
    torch._foreach_add_(norms, 1.0)
    return torch.stack([*norms, *torch._foreach_maximum(norms, 3.0)])


def _rows(x: Tensor) -> Tensor:
    """Adafactor's states."""
    rows, columns = x.new_zeros(6, 1), x.new_zeros(1, 4)
    rows.lerp_(x.square().mean(1, keepdim=True), 0.3)
    columns.lerp_(x.square().mean(0, keepdim=True), 0.3)
    return (rows @ columns).rsqrt_().mul_(x)


def _rows_foreach(x: Tensor) -> Tensor:
    rows = [x.new_zeros(6, 1), x.new_ones(6, 1)]
    torch._foreach_lerp_(rows, [x.mean(1, keepdim=True), x.sum(1, keepdim=True)], 0.3)
    return rows[0] + rows[1]


def _mask(x: Tensor) -> Tensor:
    changed = x.clone()
    changed[changed.gt(0)] = 0.5
    return changed


def _mask_without_dimensions(x: Tensor) -> Tensor:
    one, other = (x.view(-1)[:1].clone().view(()) for _ in range(2))
    one[one.gt(-9)] = 0.5
    other[other.gt(9)] = 0.5
    return one - other


PATTERNS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp_": lambda x: x.norm().clamp_(max=0.5),
    "pow_ and add_": lambda x: x.norm().pow_(2).add_(x.sum()),
    "abs_": lambda x: x.sum().abs_(),
    "sqrt_ of a mean": lambda x: x.square().mean().sqrt_(),
    "lerp_": lambda x: x.sum().lerp_(x.norm(), 0.3),
    "into a plain tensor": lambda x: torch.ones(()).add_(x.norm(), alpha=0.3),
    "a maximum into a plain tensor": lambda x: torch.ones(()).copy_(x.max()).mul_(x.abs().amin()),
    "of later operators into a plain tensor": lambda x: torch.zeros(()).add_(
        torch.stack([x.norm() ** 2, x.sum()]).sum().abs().sqrt()
    ),
    "a dot product into a plain tensor": lambda x: torch.ones(()).add_(
        torch.dot(x.flatten(), (x * 2).flatten()), alpha=2.0
    ),
    "a product into a plain tensor": lambda x: torch.zeros(6, 6).lerp_(x @ x.T, 0.2),
    "out": lambda x: torch.add(x.norm(), x.sum(), out=torch.empty(())),
    "elements of a plain tensor": _set,
    "through a view": _through_a_view,
    "through detach": _through_detach,
    "lists": _foreach,
    "rows and columns": _rows,
    "lists of rows": _rows_foreach,
    "a column times a row, out": lambda x: torch.mul(
        x.square().mean(1, keepdim=True), x.mean(0), out=torch.empty_like(x)
    ),
    "a mask": _mask,
    "a mask without dimensions": _mask_without_dimensions,
    "singular values": lambda x: torch.linalg.svdvals(x),
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "triangular factor": lambda x: torch.linalg.qr(x).R,
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x.T @ x),
    "aminmax": lambda x: torch.stack(torch.aminmax(x)),
    "aminmax of columns": lambda x: torch.aminmax(x, dim=0).max - torch.aminmax(x, dim=0).min,
    "deepcopy": lambda x: copy.deepcopy(x.norm()).mul_(2),
}


def check_patterns() -> None:
    mesh, whole = make_mesh(), random(SHAPE)
    for name, pattern in PATTERNS.items():
        expected = pattern(whole.clone())
        for x in sharded(whole, mesh):
            result = whole_of(pattern(x))
            assert result.shape == expected.shape, name
            torch.testing.assert_close(result, expected, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(whole_of(x), whole)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_optimizers_do_with_reductions(ranks: int) -> None:
    run_ranks(check_patterns, ranks)


SPREADS: dict[str, Callable[[Tensor], Tensor]] = {
    "std": lambda x: x.std(),
    "std of rows": lambda x: x.std(1),
    "var of columns": lambda x: x.var(0, keepdim=True),
    "correction": lambda x: torch.std(x, dim=(0, 1), correction=0, keepdim=True),
    "var_mean": lambda x: torch.stack(torch.var_mean(x)),
    "std_mean of columns": lambda x: torch.mul(*torch.std_mean(x, 0)),
    "std_mean of rows": lambda x: torch.std_mean(x, 1, correction=2)[0],
    "half precision": lambda x: x.bfloat16().var(),
    "no degree of freedom": lambda x: torch.var(x, correction=24),
    "one element": lambda x: x.view(-1)[:1].var(),
}


def check_spreads() -> None:
    mesh, whole = make_mesh(), random(SHAPE) + 3
    for name, spread in SPREADS.items():
        expected = spread(whole)
        for x in sharded(whole, mesh):
            result = whole_of(spread(x))
            assert result.dtype == expected.dtype, name
            torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_variances(ranks: int) -> None:
    run_ranks(check_spreads, ranks)


STEPS: list[Callable[[list[Any], chance.Random], object]] = [
    lambda v, r: v.append(r.choice(v) + r.choice(v)),
    lambda v, r: v.append(r.choice(v) * 0.5),
    lambda v, r: v.append(r.choice(v).square()),
    lambda v, r: v.append(torch.stack([r.choice(v), r.choice(v)]).mean()),
    lambda v, r: v.append(torch.where(r.choice(v) > 0, r.choice(v), r.choice(v))),
    lambda v, r: v.append(r.choice(v).clone()),
    lambda v, r: v.append(r.choice(v).view(1).select(0, 0)),
    lambda v, r: v.append(torch.zeros((), dtype=torch.float64).add_(r.choice(v))),
    lambda v, r: r.choice(v).add_(r.choice(v), alpha=0.3),
    lambda v, r: r.choice(v).mul_(r.choice(v)),
    lambda v, r: r.choice(v).copy_(r.choice(v)),
    lambda v, r: r.choice(v).clamp_(-2, 2),
    lambda v, r: r.choice(v).lerp_(r.choice(v), 0.4),
    lambda v, r: torch._foreach_mul_([r.choice(v)], 0.9),
    lambda v, r: r.choice(v).detach().sub_(1.0),
]


def run_program(x: Tensor, seed: int) -> list[Tensor]:
    order = chance.Random(seed)
    values = [x.sum(), x.norm(), x.mean(), x.max(), x.norm(1), x.new_ones(())]
    for _ in range(12):
        order.choice(STEPS)(values, order)
    return values


def check_programs(first: int) -> None:
    mesh, whole = make_mesh(), random(SHAPE, dtype=torch.float64)
    for seed in range(first, first + 15):
        expected = run_program(whole.clone(), seed)
        for x in sharded(whole, mesh):
            found = run_program(x, seed)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(whole_of(one), other, msg=lambda m, s=seed: f"{s}: {m}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_random_programs(ranks: int) -> None:
    run_ranks(check_programs, ranks, 100 * ranks)


def check_cost() -> None:
    mesh, whole = make_mesh(), random(SHAPE)
    x = sharded(whole, mesh)[1]
    with counted_collectives() as collectives:
        norms = [(x * scale).norm() for scale in range(4)]
        stacked = torch.stack(norms)
        assert collectives == []
        total = torch.linalg.vector_norm(stacked)
        total.clamp_(max=0.1)
    assert len(collectives) == 1
    with counted_collectives() as collectives:
        total.mul_(2).add_(total.new_zeros(()))
        torch.zeros(()).add_(total)
    assert collectives == []


def test_many_share_an_all_reduce() -> None:
    run_ranks(check_cost, 2)


def check_objects() -> None:
    mesh, whole = make_mesh(), random(SHAPE)
    ragged, *_, replicated = sharded(whole, mesh)
    for x in (ragged, replicated):
        total = x.sum() + x.norm()
        assert type(total) is ReplicatedTensor
        file = io.BytesIO()
        torch.save({"total": total}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["total"]
        assert type(loaded) is DTensor
        torch.testing.assert_close(whole_of(loaded), whole.sum() + whole.norm())
        before = x.detach().clone()
        x.detach().mul_(total)
        torch.testing.assert_close(whole_of(x), whole_of(before) * whole_of(total))
    assert type(replicated.view(-1)) is ReplicatedTensor
    version = replicated._local_tensor._version
    for part in replicated.chunk(2):
        part.zero_()
    assert replicated._local_tensor._version > version  # the engine reads it
    assert not whole_of(replicated).any()


def test_types_and_files() -> None:
    run_ranks(check_objects, 2)


def check_strides() -> None:
    """A copy has the strides of its local tensor: else a view of it is a copy, and loses writes."""
    for x in sharded(random(SHAPE), make_mesh()):
        outer = x @ x.T
        copies = (
            outer[:2].t().contiguous(),
            outer.t().clone(),
            x.sum(0).expand(3, SHAPE[-1]).clone(),
            torch.ones_like(x.sum(0).expand(3, SHAPE[-1])),
            torch.ones_like(outer[:2].t(), dtype=torch.float64),
        )
        for made in copies:
            local = whole_of(made)
            assert made.stride() == local.stride()
            assert made.is_contiguous() == local.is_contiguous()
            if made.is_contiguous():
                made.view(-1).zero_()
                assert not whole_of(made).any()


def test_copies_have_the_strides_that_they_say() -> None:
    run_ranks(check_strides, 2)


def check_assigned() -> None:
    x = sharded(random(SHAPE), make_mesh())[0]
    total = x.sum(0)
    total.data = x.sum(0) * 2
    torch.testing.assert_close(whole_of(total), 2 * whole_of(x).sum(0))


def test_data_of_a_partial_result_is_assigned() -> None:
    run_ranks(check_assigned, 2)


def check_gradient() -> None:
    mesh, whole = make_mesh(), random(SHAPE)
    for x in sharded(whole, mesh)[:-1]:
        leaf = x.clone().requires_grad_()
        total = (leaf * leaf).sum() * 2
        total.mul_(3)
        total.backward()
        torch.testing.assert_close(whole_of(leaf.grad), 12 * whole)


def test_gradients_through_a_write() -> None:
    run_ranks(check_gradient, 2)


def check_refused() -> None:
    mesh, whole = make_mesh(), random(SHAPE)
    x = sharded(whole, mesh)[1]
    with pytest.raises(ValueError, match="full_tensor"):
        torch.zeros(SHAPE).add_(x)  # all elements, which nobody asked to gather
    # Torch would give a part without elements the shape of the numbers.
    for rank in range(dist.get_world_size()):
        one = RaggedTensor.distribute(torch.zeros(1, 1), mesh, [RaggedShard.owner(rank, 2)])
        torch.mul(torch.full((1, 1), 3.0), torch.full((1, 1), 2.0), out=one)
        assert one._local_tensor.numel() == (dist.get_rank() == rank)
        assert one.full_tensor().item() == 6
        with pytest.raises(ValueError, match="change the shape"):
            torch.mul(torch.ones(()), torch.ones(()), out=x)
        assert one.full_tensor().item() == 6


def check_shapes_of_out() -> None:
    for x in sharded(random(SHAPE), make_mesh()):
        for out in (x.sum().clone(), x.clone()):
            with pytest.raises((ValueError, RuntimeError), match=r"shape|broadcast"):
                torch.mul(x.sum(0), 2, out=out)
            assert whole_of(out).shape == out.shape


def test_out_keeps_its_shape() -> None:
    run_ranks(check_shapes_of_out, 2)


def check_batch_of_one() -> None:
    """A weight used outside of its module: each rank has another token, or another input."""
    for x in sharded(random(SHAPE), make_mesh())[:-1]:  # of a replicated one torch warns, once
        token, row = torch.tensor([dist.get_rank()]), torch.ones(1, 1)
        attempts: list[Callable[[Tensor], Tensor]] = [
            lambda w, token=token: torch.nn.functional.embedding(token, w),
            lambda w, row=row: torch.nn.functional.linear(row, w[:, :1]),
            lambda w, token=token: w.index_select(0, token),
        ]
        for attempt in attempts:
            with pytest.raises(NotImplementedError, match="plain tensor"):
                attempt(x)


def test_a_batch_of_one_is_no_number() -> None:
    run_ranks(check_batch_of_one, 2)


def test_what_is_refused() -> None:
    run_ranks(check_refused, 2)
