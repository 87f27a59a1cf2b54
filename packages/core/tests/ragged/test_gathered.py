"""Matrix products and permutations of ragged tensors, and new tensors of other shapes."""

from __future__ import annotations

import copy
import pickle
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
    "cat": lambda x, y: torch.cat([x.flatten(), y.flatten(), x.sum()[None]]) * 2,
    "stack": lambda x, y: torch.stack([x, y], 1).cumsum(0),
    "softmax": lambda x, y: x.softmax(-1) * y.log_softmax(0),
    "sort": lambda x, y: x.sort(0).values + y.flip(0),
    "topk": lambda x, y: x.topk(2).values.sum(1) * y.median(),
    "quantile": lambda x, y: torch.quantile(x, 0.3) + y.kthvalue(3, 0).values.sum(),
    "triangle": lambda x, y: x.tril() + y.triu(1),
    "repeated": lambda x, y: x.repeat(2, 1) + F.pad(y, (0, 0, 0, 6)),
    "losses": lambda x, y: F.mse_loss(x, y) + F.kl_div(x, y, reduction="sum", log_target=True),
    "column": lambda x, y: x[:, 1] + y[:, -1:].squeeze(1),
    "columns": lambda x, y: x[:, 1:3] * y.split(2, 1)[1] + x[..., 0, None],
    "every other row": lambda x, y: x[::2] * y[1::2],
    "a row of the transposed": lambda x, y: x.T[1] * y.unbind(1)[2],
    # Local parts that would broadcast, and wrongly: half of the matrix, half of the row.
    "a row beside": lambda x, y: (x + y[0]) * y[:1],
    "a column beside": lambda x, y: x * y[:, :1] / (1 + y.square().mean(1, keepdim=True)),
    "a column times a row": lambda x, y: x.mean(1, keepdim=True) * y.square().mean(0),
    "a row is written beside": lambda x, y: (x * 1).mul_(y[2]).addcmul_(y, y[1], value=0.5),
    "views of views": lambda x, y: x.T.reshape(-1) + y[:, 1:3].flatten()[:1] * y.T[1, 2],
    "a diagonal": lambda x, y: x.diagonal() * y.unfold(0, 2, 2).sum((0, 2)),
    "select": lambda x, y: x[1] * y.select(1, 0).sum(),
    "addmm": lambda x, y: torch.addmm(x @ x.T, x, y.T, beta=0.5),
}


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda x: x.argmax(),
    "argsort": lambda x: x.argsort(1),
    "nonzero": lambda x: (x > 0).nonzero(),
    "masked": lambda x: x[x > 0],
    "unique": lambda x: x.round().unique(),
    "histc": lambda x: torch.histc(x, 5),
    "foreach max": lambda x: torch.stack(torch._foreach_max([x, x * 2])),
    "distance": lambda x: torch.dist(x, x * 2),
    "isin": lambda x: torch.isin(x.round(), 1.0),
}


def check_statistics() -> None:
    one = random((6, 4)).double()
    for x in layouts_of(one):
        for name, statistic in STATISTICS.items():
            expected = statistic(one)
            torch.testing.assert_close(
                whole(statistic(x)), expected, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_statistics_are_those_of_the_whole() -> None:
    run_ranks(check_statistics, 2)


def check_copies_of_views() -> None:
    for x in layouts_of(random((6, 4))):
        for copied in (copy.deepcopy(x.T), pickle.loads(pickle.dumps(x.T))):
            torch.testing.assert_close(whole(copied), whole(x).T)
        assert x.T[1, 2].item() == whole(x)[2, 1]


def test_copies_of_views_are_gathered() -> None:
    run_ranks(check_copies_of_views, 2)


def check_initialisation() -> None:
    for shape in ((6, 4), (4, 4)):
        for x in layouts_of(torch.zeros(shape)):
            nn.init.orthogonal_(x)
            product = whole(x).T @ whole(x)
            torch.testing.assert_close(product, torch.eye(4), atol=1e-5, rtol=0)


def test_orthogonal_initialisation() -> None:
    run_ranks(check_initialisation, 2)


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
                torch._foreach_mul_([x.t(), x[:, 1]], 2.0)
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
