"""Ragged tensors that are partial along another axis: linear operators, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.testing import run_ranks

from .helpers import random
from .layouts import grid, same

CUT = RaggedShard((0,), (1, 3))

LINEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul by a number": lambda x, y: x * 2.5,
    "number times": lambda x, y: 2.5 * x,
    "div by a number": lambda x, y: x / 4,
    "neg": lambda x, y: -x,
    "mul by a tensor of one element": lambda x, y: x * torch.tensor(0.5),
    "mul_": lambda x, y: x.clone().mul_(3),
    "div_": lambda x, y: x.clone().div_(3.0),
    "add": lambda x, y: x + y,
    "add with a factor": lambda x, y: torch.add(x, y, alpha=2),
    "sub": lambda x, y: x - y,
    "add_": lambda x, y: x.clone().add_(y, alpha=0.5),
    "copy_": lambda x, y: torch.zeros_like(x).copy_(y),
    "clone": lambda x, y: x.clone(),
    "detach": lambda x, y: x.detach(),
    "cast": lambda x, y: x.double(),
    "zeros_like": lambda x, y: torch.zeros_like(x),
    "zero_": lambda x, y: x.clone().zero_(),
    "view": lambda x, y: x.view(12, 2).view(4, 6),
    "part": lambda x, y: x[1:3],
    "foreach mul": lambda x, y: torch._foreach_mul([x, y], 2.0)[1],
    "foreach mul by numbers": lambda x, y: torch._foreach_mul([x, y], [2.0, 3.0])[1],
    "foreach div": lambda x, y: torch._foreach_div([x], 3.0)[0],
    "foreach add": lambda x, y: torch._foreach_add([x], [y], alpha=0.5)[0],
}

OTHERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add a number": lambda x, y: x + 1,
    "product": lambda x, y: x * y,
    "square": lambda x, y: x**2,
    "div by itself": lambda x, y: x / y,
    "number by tensor": lambda x, y: 1 / x,
    "floor division": lambda x, y: torch.div(x, 2, rounding_mode="floor"),
    "abs": lambda x, y: x.abs(),
    "compare": lambda x, y: x > 0,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "to integers": lambda x, y: x.int(),
    "fill_": lambda x, y: x.fill_(1.0),
    "ones_like": lambda x, y: torch.ones_like(x),
    "clamp": lambda x, y: x.clamp(max=1.0),
    "foreach add a number": lambda x, y: torch._foreach_add([x], 1.0),
    "foreach mul": lambda x, y: torch._foreach_mul([x], [y]),
    "sum": lambda x, y: x.sum(),
    "max": lambda x, y: x.max(),
    "norm": lambda x, y: x.norm(),
    "foreach norm": lambda x, y: torch._foreach_norm([x]),
    "equal": lambda x, y: torch.equal(x, y),
    "normal_": lambda x, y: x.normal_(),
}


def partial(placement: Placement, seed: int) -> tuple[RaggedTensor, list[Tensor]]:
    """A partial tensor of shape (4, 6), and what each rank of the outer axis contributes."""
    parts = [random((4, 6), seed=seed + outer) for outer in range(2)]
    outer, inner = divmod(dist.get_rank(), 2)
    start, stop = CUT.local_range((4, 6), inner)
    local = parts[outer].flatten()[start:stop].clone()
    return RaggedTensor.from_local(local, grid(), [placement, CUT], shape=(4, 6)), parts


def check_linear() -> None:
    for operation in ("sum", "avg"):
        placement, divisor = Partial(operation), 2 if operation == "avg" else 1
        for name, operator in LINEAR.items():
            (x, xs), (y, ys) = partial(placement, 0), partial(placement, 2)
            result = operator(x, y)
            assert result.placements[0] == placement, name
            total = redistribute(result, placements=[Replicate(), result.placements[1]])
            expected = operator(sum(xs) / divisor, sum(ys) / divisor)
            same(total, expected, name)


def test_linear_operators_give_what_the_sum_would_give() -> None:
    run_ranks(check_linear, 4)


def check_others() -> None:
    (x, _), (y, _) = partial(Partial(), 0), partial(Partial(), 2)
    for name, operator in OTHERS.items():
        with pytest.raises(NotImplementedError, match="redistribute the Partial axis first"):
            raise AssertionError(f"{name} gave {operator(x, y)}")
    (largest, _), (other, _) = partial(Partial("max"), 0), partial(Partial("max"), 2)
    for name in ("mul by a number", "neg", "add"):  # a maximum does not commute with them
        with pytest.raises(NotImplementedError, match="redistribute the Partial axis first"):
            LINEAR[name](largest, other)
    full = RaggedTensor.distribute(random((4, 6)), grid(), [Replicate(), CUT])
    with pytest.raises(ValueError, match="sharded differently"):
        x + full


def test_all_other_operators_are_refused() -> None:
    run_ranks(check_others, 4)
