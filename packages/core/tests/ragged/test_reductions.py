"""Sums, means, extremes and norms of ragged tensors are those of the dense ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, combinations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import ReplicatedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh, random
from .layouts import (
    Results,
    composed,
    counted_collectives,
    grid,
    layouts_of,
    same,
    whole_of,
)

SHAPES: list[tuple[int, ...]] = [(), (5,), (4, 3), (3, 1, 4), (1, 4, 2), (2, 3, 2, 2)]

ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "prod": lambda x: x.prod(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "any": lambda x: (x > 1).any(),
    "all": lambda x: (x > -9).all(),
    "count_nonzero": lambda x: x.round().count_nonzero(),
    "sum of integers": lambda x: (x * 8).int().sum(),
    "sum of truth values": lambda x: (x > 0).sum(),
    "prod of integers": lambda x: (x * 8).int().prod(),
    "max of integers": lambda x: (x * 8).int().max(),
    "min of short integers": lambda x: (x * 8).to(torch.int16).min(),
    "min of bytes": lambda x: (x * 8).abs().to(torch.uint8).min(),
    "any of bytes": lambda x: x.abs().to(torch.uint8).any(),
    "max of truth values": lambda x: (x > 0).max(),
    "sum in double": lambda x: x.sum(dtype=torch.float64),
    "mean in double": lambda x: x.mean(dtype=torch.float64),
    "mean of integers": lambda x: (x * 8).int().mean(dtype=torch.float32),
    "norm in double": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
    **{
        f"norm {order}": lambda x, order=order: torch.linalg.vector_norm(x, order)
        for order in (0, 0.5, 1, 2, 3, math.inf, -1, -2, -math.inf)
    },
}

SOME: dict[str, Callable[[Tensor, tuple[int, ...], bool], Tensor]] = {
    "sum": lambda x, dims, keep: x.sum(dims, keepdim=keep),
    "mean": lambda x, dims, keep: x.mean(dims, keepdim=keep),
    "amax": lambda x, dims, keep: x.amax(dims, keepdim=keep),
    "amin": lambda x, dims, keep: x.amin(dims, keepdim=keep),
    "prod": lambda x, dims, keep: x.prod(dims[-1], keepdim=keep),
    "any": lambda x, dims, keep: (x > 1).any(dims, keepdim=keep),
    "all": lambda x, dims, keep: (x > -1).all(dims[0], keepdim=keep),
    "count_nonzero": lambda x, dims, keep: x.round().count_nonzero(dims),
    "norm": lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keepdim=keep),
    "norm 0.5": lambda x, dims, keep: torch.linalg.vector_norm(x, 0.5, dims, keepdim=keep),
    "norm 0": lambda x, dims, keep: torch.linalg.vector_norm(x.round(), 0, dims, keepdim=keep),
    "norm -1": lambda x, dims, keep: torch.linalg.vector_norm(x, -1, dims, keepdim=keep),
    "norm inf": lambda x, dims, keep: torch.linalg.vector_norm(x, math.inf, dims, keepdim=keep),
    "norm -inf": lambda x, dims, keep: torch.linalg.vector_norm(x, -math.inf, dims, keepdim=keep),
}

AT_ONCE = ("amin", "any", "all", "norm inf", "norm -inf")


def subsets(num_dims: int) -> list[tuple[int, ...]]:
    """Of the dimensions, counted from the front and one from the back; not the empty one."""
    every = chain.from_iterable(combinations(range(num_dims), n) for n in range(1, num_dims + 1))
    return [*every, (-1,)]


def check_all() -> None:
    results = Results()
    for shape in SHAPES:
        whole = random(shape)
        for x in layouts_of(whole):
            for name, reduce in ALL.items():
                result = reduce(x)
                assert type(result) is ReplicatedTensor, name
                results.add(result, reduce(whole), (name, x.placements))
    results.check()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_over_all_dimensions(world_size: int) -> None:
    run_ranks(check_all, world_size)


def check_some() -> None:
    results = Results()
    for shape in SHAPES[1:]:
        whole = random(shape)
        for x in layouts_of(whole):
            for dims in subsets(len(shape)):
                for name, reduce in SOME.items():
                    if name in AT_ONCE and len(dims) % 2:
                        continue  # these communicate: fewer of them, for time
                    keep = name in ("norm", "amax") or len(dims) == 1
                    where = (name, x.placements, dims, keep)
                    results.add(reduce(x, dims, keep), reduce(whole, dims, keep), where)
    results.check()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_over_some_dimensions(world_size: int) -> None:
    run_ranks(check_some, world_size)


def check_every_cut() -> None:
    """Of six elements over three ranks: 28 cuts."""
    whole, results, mesh = random((2, 3)), Results(), make_mesh()
    for first in range(7):
        for second in range(7 - first):
            runs = [(1, first), (1, second), (1, 6 - first - second)]
            cut = RaggedShard.from_runs_of_elements(runs, (2, 3))
            x = RaggedTensor.distribute(whole, mesh, [cut])
            for dims in [(0,), (1,), (0, 1)]:
                for name in ("sum", "mean", "prod", "norm", "norm -1", "count_nonzero"):
                    expected = SOME[name](whole, dims, False)
                    results.add(SOME[name](x, dims, False), expected, (name, cut, dims))
            results.add(x.amax(1), whole.amax(1), cut)
    results.check()


def test_every_cut_of_a_small_shape() -> None:
    run_ranks(check_every_cut, 3)


def check_composed() -> None:
    whole = random((4, 6, 2))
    for x in composed(whole):
        for name in ("sum", "mean", "max", "prod", "any", "norm 2", "norm 3", "norm -inf"):
            same(ALL[name](x), ALL[name](whole), (name, x.placements))
        for dims in ((0,), (1,), (2,), (1, 2)):
            for name in ("sum", "amax", "norm"):
                for keep in (False, True):
                    result = SOME[name](x, dims, keep)
                    same(result, SOME[name](whole, dims, keep), (name, x.placements, dims, keep))


def test_beside_other_placements() -> None:
    run_ranks(check_composed, 4)


# --- what layout comes out ------------------------------------------------------------------------


def check_layouts() -> None:
    rows = RaggedTensor.distribute(random((6, 4)), make_mesh(), [RaggedShard((0,), (1, 2))])
    cells = RaggedTensor.distribute(random((6, 4)), make_mesh(), [RaggedShard((0, 1), (7, 17))])
    owned = RaggedTensor.distribute(random((6, 4)), make_mesh(), [RaggedShard.owner(1, 2)])
    with counted_collectives() as collectives:
        of_rows = rows.sum(1)
        assert (type(of_rows), of_rows.shape) == (RaggedTensor, (6,))
        assert of_rows.placements == (RaggedShard((0,), (1, 2)),)
        kept = rows.mean(1, keepdim=True)
        assert (kept.shape, kept.placements) == ((6, 1), (RaggedShard((0,), (1, 2)),))
        at_owner = owned.amax(0)
        assert (at_owner.shape, at_owner.placements) == ((4,), (RaggedShard.owner(1, 2),))
        sums: list[tuple[Tensor, tuple[int, ...]]] = [
            (rows.sum(0), (4,)),
            (cells.sum(1), (6,)),
            (cells.mean(), ()),
            (rows.count_nonzero(), ()),
        ]
    assert collectives == []
    for result, shape in sums:
        assert (type(result), result.shape, result.placements) == (
            ReplicatedTensor,
            shape,
            (Partial(),),
        )
    with counted_collectives() as collectives:
        for result in (rows.amax(0), cells.amin(1), cells.max(), cells.isnan().any()):
            assert (type(result), result.placements) == (ReplicatedTensor, (Replicate(),))
    assert collectives == ["all_reduce"] * 4
    # Of the whole, as of any DTensor: they are no part of a training step.
    for gathered in (rows.prod(), rows.var(1), rows.std(), *rows.max(1), *torch.aminmax(rows)):
        assert (type(gathered), gathered.placements) == (ReplicatedTensor, (Replicate(),))


def test_ragged_where_no_slice_is_cut_else_partial_or_replicated() -> None:
    run_ranks(check_layouts, 2)


def check_composed_layouts() -> None:
    x = RaggedTensor.distribute(random((4, 6)), grid(), [Shard(1), RaggedShard((0,), (1, 3))])
    assert x.sum(1).placements == (Partial(), Partial())
    assert x.sum(0).placements == (Partial(), Partial())
    assert x.amax(1).placements == (Replicate(), Replicate())
    y = RaggedTensor.distribute(random((4, 6)), grid(), [Replicate(), RaggedShard((0,), (1, 3))])
    assert y.sum().placements == (Replicate(), Partial())
    z = RaggedTensor.distribute(random((4, 6, 2)), grid(), [Shard(1), RaggedShard((0,), (1, 3))])
    assert z.sum(2).placements == (Shard(1), RaggedShard((0,), (1, 3)))


def test_other_axes_stay_as_they_are_where_their_dimension_does() -> None:
    run_ranks(check_composed_layouts, 4)


def check_indices_of_cut_slices() -> None:
    mesh, whole = make_mesh(), random((4, 3))
    rows = RaggedTensor.distribute(whole, mesh, [RaggedShard((0,), (1, 3))])
    cells = RaggedTensor.distribute(whole, mesh, [RaggedShard((0, 1), (4, 8))])
    owned = RaggedTensor.distribute(whole, mesh, [RaggedShard.owner(1, 2)])
    for x, dim in ((rows, 1), (owned, 0), (owned, 1)):
        for keep in (False, True):
            for found, expected in zip(x.max(dim, keep), whole.max(dim, keep), strict=True):
                same(found, expected)
        same(x.min(dim).indices, whole.min(dim).indices)
    for x, dim in ((rows, 0), (cells, 0), (cells, 1), (rows[:, None, 0:3].view(12), 0)):
        for found, expected in zip(x.max(dim), x.full_tensor().max(dim), strict=True):
            same(found, expected)
    for x in layouts_of(random((4, 3)) * (1 + 2j)):
        same(x.var(), x.full_tensor().var())


def test_indices_and_slices_that_are_cut() -> None:
    run_ranks(check_indices_of_cut_slices, 2)


# --- not a number, no elements, half precision ----------------------------------------------------


def check_nan() -> None:
    whole = random((4, 3))
    for place in ((0, 0), (3, 2), (1, 1)):
        bad = whole.clone()
        bad[place] = math.nan
        for x in layouts_of(bad):
            for name in ("sum", "mean", "max", "min", "norm 2", f"norm {math.inf}", "norm -inf"):
                assert whole_of(ALL[name](x)).isnan(), (name, x.placements)
            for dims in ((0,), (1,)):
                for name in ("amax", "amin", "sum", "norm", "norm inf"):
                    same(SOME[name](x, dims, False), SOME[name](bad, dims, False), name)
        for value in (math.inf, -math.inf):
            for x in layouts_of(torch.full((4, 3), value)):
                assert whole_of(x.max()) == value
                assert whole_of(x.min()) == value
                assert whole_of(x.amax(0)).tolist() == [value] * 3
                assert whole_of(x.sum()) == value


def test_nan_and_infinity_survive_and_none_appear() -> None:
    """Also where a rank that holds nothing takes part: its neutral element changes nothing."""
    run_ranks(check_nan, 3)


def check_nothing() -> None:
    for shape in [(0,), (0, 3), (3, 0), (2, 0, 3)]:
        whole = torch.zeros(shape)
        for x in layouts_of(whole):
            for name in ("sum", "mean", "prod", "any", "all", "count_nonzero", "norm 2", "norm 0"):
                same(ALL[name](x), ALL[name](whole), (name, shape))
            for dims in subsets(len(shape)):
                for name in ("sum", "mean", "prod", "any", "norm", "norm 0"):
                    same(SOME[name](x, dims, True), SOME[name](whole, dims, True), (name, shape))
                for name in ("amax", "amin", "norm inf", "norm -1"):
                    try:
                        expected = SOME[name](whole, dims, False)
                    except (IndexError, RuntimeError) as error:
                        with pytest.raises(type(error), match="an empty tensor has no"):
                            SOME[name](x, dims, False)
                    else:
                        same(SOME[name](x, dims, False), expected)
            with pytest.raises(RuntimeError, match="an empty tensor has no max"):
                x.max()


def test_of_no_elements() -> None:
    run_ranks(check_nothing, 2)


def check_half() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        whole = random((64, 48)).abs().to(dtype)  # partial sums that do not cancel
        for x in layouts_of(whole):
            for name in ("sum", "mean", "max", "min", "norm 2", "norm 1"):
                same(ALL[name](x), ALL[name](whole), name, rtol=2e-2)
            for name in ("sum", "mean", "amax", "norm"):
                same(SOME[name](x, (0,), False), SOME[name](whole, (0,), False), name, rtol=2e-2)
    large = torch.full((40, 40), 1000.0, dtype=torch.float16)
    for x in layouts_of(large):
        assert whole_of(x.mean()) == 1000  # the sum, 1.6 million, is more than half can hold


def test_half_precision_is_summed_in_single() -> None:
    run_ranks(check_half, 2)


def check_errors() -> None:
    (x, *_) = layouts_of(random((4, 3)))
    with pytest.raises(IndexError, match="dimension 2 of a RaggedTensor of 2 dimensions"):
        x.sum(2)
    with pytest.raises(RuntimeError, match="twice"):
        x.sum((0, 0))
    with pytest.raises(RuntimeError, match=r"the mean of torch\.int32 is not defined"):
        x.int().mean()
    with pytest.raises(RuntimeError, match="expected a tensor of floating-point"):
        torch.linalg.vector_norm(x.int())
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        x.detach().requires_grad_().prod()


def check_gradients_of_the_gathered() -> None:
    one = random((4, 3)).double()
    for x in layouts_of(one):
        for name, reduce in GATHERED.items():
            ragged, plain = x.detach().requires_grad_(), one.clone().requires_grad_()
            whole_of(reduce(ragged)).sum().backward()
            reduce(plain).sum().backward()
            assert ragged.grad is not None
            assert ragged.grad.placements == x.placements
            same(ragged.grad, plain.grad, name)


GATHERED: dict[str, Callable[[Tensor], Tensor]] = {
    "max of rows": lambda x: x.max(1).values * 2,
    "var": lambda x: x.var(),
    "std of columns": lambda x: x.std(0),
}


def test_gradients_of_those_that_are_gathered() -> None:
    run_ranks(check_gradients_of_the_gathered, 2)


def test_errors_are_raised_on_every_rank_alike() -> None:
    run_ranks(check_errors, 2)


# --- torch.equal ----------------------------------------------------------------------------------


def check_equal() -> None:
    whole = random((4, 3))
    other = whole.clone()
    other[3, 2] += 1  # on one rank only
    for x, y in zip(layouts_of(whole), layouts_of(other), strict=True):
        assert torch.equal(x, x.clone())
        with counted_collectives() as collectives:
            assert not torch.equal(x, y)
        assert collectives == ["all_reduce"]
        assert not torch.equal(x, x.view(3, 4))
        replicated = DTensor.from_local(whole, x.device_mesh, [Replicate()], run_check=False)
        assert torch.equal(x, replicated)
        assert torch.allclose(x, x + 1e-9)
        assert not torch.allclose(x, y)
    assert dist.get_world_size() == 3


def test_equal_is_one_answer_for_all_ranks() -> None:
    run_ranks(check_equal, 3)
