"""Tensors of one shape that are cut differently: one of them is moved."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import assert_holds, cuts, make_mesh, random
from .layouts import counted_collectives

# The result lies where the first argument lies.
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "compare": lambda x, y: x > y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "copy_": lambda x, y: x.clone().copy_(y),
    "lerp_": lambda x, y: x.clone().lerp_(y, 0.3),
    "mul_ add_": lambda x, y: x.clone().mul_(0.9).add_(y, alpha=0.1),
    "out": lambda x, y: torch.add(y, y, out=torch.empty_like(x)),
    "a number from the other": lambda x, y: x * y.max(),
    "foreach add": lambda x, y: torch._foreach_add([x, x], [x, y])[1],
    "foreach mul_": lambda x, y: _after(torch._foreach_mul_, [x, x.clone()], [x, y]),
    "foreach add_": lambda x, y: _after(torch._foreach_add_, [y.clone(), x.clone()], [y, y]),
    "foreach lerp_": lambda x, y: _after(torch._foreach_lerp_, [x, x.clone()], [x, y], 0.3),
    "foreach copy_": lambda x, y: _after(torch._foreach_copy_, [x, x.clone()], [x, y]),
    "foreach with a plain one": lambda x, y: torch._foreach_sub(
        [torch.ones(2), x], [torch.ones(2), y]
    )[1],
}


def _after(func: Callable[..., object], first: list[Tensor], *others: object) -> Tensor:
    func(first, *others)
    return first[-1]


def check_operators() -> None:
    mesh, one, other = make_mesh(), random(seed=1), random(seed=2)
    for a, b in product(cuts(), cuts()):
        for name, operator in OPERATORS.items():
            x = RaggedTensor.distribute(one, mesh, [a])
            y = RaggedTensor.distribute(other, mesh, [b])
            result = operator(x, y)
            try:
                assert_holds(result, operator(one.clone(), other.clone()), like=x)
            except AssertionError as error:
                raise AssertionError(f"{name} of {a} and {b}: {error}") from error
            assert y.placements == (b,)
            assert torch.equal(y.full_tensor(), other)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_result_lies_where_the_first_argument_lies(world_size: int) -> None:
    run_ranks(check_operators, world_size)


def check_equal() -> None:
    mesh, whole = make_mesh(), random()
    changed = whole.clone()
    changed[5, 15] += 1  # on one rank only
    for a, b in product(cuts(), cuts()):
        x = RaggedTensor.distribute(whole, mesh, [a])
        assert torch.equal(x, RaggedTensor.distribute(whole, mesh, [b]))
        assert not torch.equal(x, RaggedTensor.distribute(changed, mesh, [b]))
        assert torch.allclose(RaggedTensor.distribute(whole + 1e-9, mesh, [b]), x)


@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_compares_tensors_that_are_cut_differently(world_size: int) -> None:
    run_ranks(check_equal, world_size)


def check_cost() -> None:
    mesh, whole = make_mesh(), random()
    x, y = (RaggedTensor.distribute(whole, mesh, [cut]) for cut in cuts()[:2])
    with counted_collectives() as seen:
        x.clone().mul_(0.5).add_(y)
    assert seen == ["all_to_all_single"]  # of what changes its rank
    with counted_collectives() as seen:
        torch._foreach_add([x, x, y], [x, y, y])
    assert seen == ["all_to_all_single"]
    with counted_collectives() as seen:
        x.clone().add_(x.clone())
    assert seen == []


def test_only_what_is_cut_differently_moves() -> None:
    run_ranks(check_cost, 2)


def check_gradients() -> None:
    mesh = make_mesh()
    for a, b in product(cuts(), cuts()):
        wholes = [random(seed=seed).requires_grad_() for seed in (1, 2)]
        x, y = (
            RaggedTensor.distribute(whole.detach(), mesh, [cut]).requires_grad_()
            for whole, cut in zip(wholes, (a, b), strict=True)
        )
        for one, other in ((x, y), wholes):
            (
                (one * other + other).square().sum() + torch._foreach_mul([one], [other])[0].sum()
            ).backward()
        for ragged, whole in zip((x, y), wholes, strict=True):
            assert ragged.grad.placements == ragged.placements
            torch.testing.assert_close(ragged.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_lie_where_their_tensors_lie(world_size: int) -> None:
    run_ranks(check_gradients, world_size)


def check_meta() -> None:
    mesh, whole = make_mesh(), random().to("meta")
    for a, b in product(cuts(), cuts()):
        x, y = (RaggedTensor.distribute(whole, mesh, [cut]) for cut in (a, b))
        with counted_collectives() as seen:
            assert (x + y).to_local().shape == x.to_local().shape
        assert seen == []


def test_without_memory() -> None:
    run_ranks(check_meta, 2)


def check_two_axes() -> None:
    grid, cut = init_device_mesh("cpu", (2, 2)), RaggedShard((0,), (1, 5))
    one, other = random(seed=1), random(seed=2)
    x = RaggedTensor.distribute(one, grid, [Replicate(), cut])
    y = RaggedTensor.distribute(other, grid, [cut, Replicate()])
    assert_holds(x + y, one + other, like=x)
    assert_holds(y - x, other - one, like=y)


def test_on_two_axes() -> None:
    run_ranks(check_two_axes, 4)


def check_refused() -> None:
    mesh, whole = make_mesh(), random()
    x, y = (RaggedTensor.distribute(whole, mesh, [cut]) for cut in cuts()[:2])
    # A fused optimizer writes to both; there is no one layout for them.
    states = [[x.clone()], [y.clone()], [x.clone()], [x.clone()], [], [torch.zeros(())]]
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    with pytest.raises(ValueError, match=r"sharded differently.*placements of the other"):
        torch._fused_adamw_(*states, amsgrad=False, maximize=False, **options)
    assert torch.equal(states[0][0], x)


def test_what_is_written_never_moves() -> None:
    run_ranks(check_refused, 2)
