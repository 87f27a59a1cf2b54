"""Matrix products and permutations of ragged tensors, and new tensors of other shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

from vescale_fsdp import RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import random
from .layouts import counted_collectives, layouts_of

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda x, y: x @ y.T,
    "orthogonality": lambda x, y: (x @ x.T).square().sum() + y.sum(),
    "adapter": lambda x, y: torch.linalg.norm(x + 2.0 * (y @ (x.T @ y)), dim=1),
    "permute": lambda x, y: x.permute(1, 0) * 2 + y.t(),
    "transpose": lambda x, y: (x.transpose(0, 1) + 1).sum(0) + y.sum(),
    "beside a sharded one": lambda x, y: x.view(4, 6) * y.t() + y.t(),
    "addmm": lambda x, y: torch.addmm(x @ x.T, x, y.T, beta=0.5),
}


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_operators() -> None:
    one, other = random((6, 4)).double(), random((6, 4), seed=1).double()
    for x, y in zip(layouts_of(one), layouts_of(other), strict=True):
        for name, operator in OPERATORS.items():
            ragged = [each.detach().requires_grad_() for each in (x, y)]
            plain = [each.clone().requires_grad_() for each in (one, other)]
            result, expected = operator(*ragged), operator(*plain)
            torch.testing.assert_close(whole(result), expected, msg=lambda m, n=name: f"{n}: {m}")
            whole(result).square().sum().backward()
            expected.square().sum().backward()
            for mine, theirs in zip(ragged, plain, strict=True):
                assert mine.grad is not None
                assert mine.grad.placements == mine.placements
                torch.testing.assert_close(whole(mine.grad), theirs.grad)


def test_products_are_those_of_the_whole() -> None:
    run_ranks(check_operators, 2)


def check_refused() -> None:
    for x in layouts_of(random((6, 4))):
        with counted_collectives() as counts:
            for attempt in (
                lambda x=x: x @ torch.ones(4, 2),
                lambda x=x: F.linear(torch.ones(2, 4), x),
                lambda x=x: x.t() + torch.ones(4, 6),
            ):
                with pytest.raises(NotImplementedError, match=r"plain tensor.*full_tensor\(\)"):
                    attempt()
            with pytest.raises(NotImplementedError, match="the write would be lost"):
                x.t().zero_()
            with pytest.raises(NotImplementedError, match="the write would be lost"):
                nn.init.normal_(x.permute(1, 0))
        assert not counts


def test_what_would_differ_or_be_lost_is_refused_before_communication() -> None:
    run_ranks(check_refused, 2)


def check_new() -> None:
    """As torchtitan makes the parts of a fused weight, for its initialisation."""
    for x in layouts_of(random((6, 4))):
        for made in (x.new_zeros(3, 5), x.new_empty((3, 5)).zero_(), x.new_full((3, 5), 0.0)):
            assert isinstance(made, DTensor)
            assert made.placements == (Replicate(),)
            assert torch.equal(made.full_tensor(), torch.zeros(3, 5))
        assert isinstance(x.new_zeros(x.shape), RaggedTensor)


def test_new_tensors_of_another_shape_are_replicated() -> None:
    run_ranks(check_new, 2)
