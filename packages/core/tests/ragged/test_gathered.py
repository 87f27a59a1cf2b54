"""Matrix products and permutations of ragged tensors, and new tensors of other shapes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from random import Random as Draw

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
                lambda x=x: x.t().mul_(torch.ones(4, 6)),
                lambda x=x: x.index_add_(0, torch.tensor([0, 1]), x[:2]),
            ):
                with pytest.raises(NotImplementedError, match=r"plain tensor.*full_tensor\(\)"):
                    attempt()
            with pytest.raises(NotImplementedError, match="the write would be lost"):
                x.t().reshape(-1).zero_()  # a copy, of a plain tensor too
            with pytest.raises(NotImplementedError, match="which autograd cannot follow"):
                (x.clone().requires_grad_() * 2).t().mul_(2)
        assert not counts


def test_what_would_differ_or_be_lost_is_refused_before_communication() -> None:
    run_ranks(check_refused, 2)


def check_beside_ragged() -> None:
    """The rule of the ragged operand knows what may stand beside, also of a view."""
    dense, one = random((4, 4)), torch.tensor([2.0])
    for x in layouts_of(dense):
        found = torch.where(x > 0, x.T, one)
        torch.testing.assert_close(whole(found), torch.where(dense > 0, dense.T, one))
        first, second = torch._foreach_add([x, one], [x.T, one])
        torch.testing.assert_close(whole(first), dense + dense.T)
        assert second == 4
        with pytest.raises(NotImplementedError, match="full_tensor"):
            x.clone().resize_((3, 4), memory_format=torch.contiguous_format)


def test_a_view_stands_beside_what_a_ragged_tensor_takes() -> None:
    run_ranks(check_beside_ragged, 2)


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


# --- writes ---------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor], object]] = {
    "column": lambda x: x[:, 1].zero_(),
    "columns": lambda x: x[:, 1:3].fill_(7),
    "every other row": lambda x: x[::2].add_(1),
    "transposed": lambda x: x.t().mul_(2),
    "a row of the transposed": lambda x: x.T[0].exp_(),
    "a part of a split": lambda x: x.split(2, 1)[1].neg_(),
    "a view of an unbound one": lambda x: x.unbind(1)[0].view(2, 3)[0].zero_(),
    "a list": lambda x: torch._foreach_mul_([x[:, 0], x[:, 1]], 3.0),
    "a column from another": lambda x: x.__setitem__((slice(None), 1), x[:, 2] + x.sum(1)),
    "a diagonal": lambda x: x.diagonal().fill_(9),
    "clamped": lambda x: x.permute(1, 0).clamp_(min=0),
    "normalized": lambda x: x.T.div_(x.T.square().sum().sqrt()),
    "masked": lambda x: x.T.masked_fill_(x.T > 0, 1.0),
    "by a mask": lambda x: x.T.__setitem__(x.T > 0, 1.0),
    "cumulated": lambda x: x.cumsum_(0),
    "cumulated and transposed": lambda x: x.T.cumsum_(0),
    "triangle": lambda x: x.triu_(),
    "filled diagonal": lambda x: x.fill_diagonal_(3.0),
    "one row": lambda x: x.index_fill_(0, torch.tensor(1), 1.0),
    "detached": lambda x: x.detach()[:, 0].zero_(),
}


def check_writes() -> None:
    for name, write in WRITES.items():
        expected = random((6, 4)).double()
        write(expected)
        for x in layouts_of(random((6, 4)).double()):
            version, holding = x._version, nn.Parameter(x, requires_grad=False)
            write(x)
            torch.testing.assert_close(whole(x), expected, msg=lambda m, n=name: f"{n}: {m}")
            assert x._version > version, name
            assert torch.equal(whole(holding), whole(x))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_written_to_views_and_by_other_operators_is_kept(num_ranks: int) -> None:
    run_ranks(check_writes, num_ranks)


CHAIN: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.transpose(0, -1),
    lambda x: x[1:],
    lambda x: x[..., :-1],
    lambda x: x[::2],
    lambda x: x.unsqueeze(0),
    lambda x: x.squeeze(),
    lambda x: x.flatten(),
    lambda x: x.view(-1),
    lambda x: x.view(*x.shape[1:], x.shape[0]),
    lambda x: x.movedim(0, -1),
    lambda x: x.unfold(0, 2, 2),
    lambda x: x.select(-1, 0),
    lambda x: x.diagonal(),
    lambda x: x.chunk(2, -1)[0],
]


def check_random_writes(seed: int) -> None:
    """A write to views of views is that to a plain tensor, or refused."""
    draw, num_kept = Draw(seed), 0
    for _ in range(40):
        chain = draw.choices(CHAIN, k=draw.randint(1, 4))
        expected = random((6, 4)).double()
        try:
            view = expected
            for step in chain:
                view = step(view)
        except (RuntimeError, IndexError, TypeError):
            continue
        is_view = view.untyped_storage().data_ptr() == expected.untyped_storage().data_ptr()
        view.mul_(2).sub_(1)
        for x in layouts_of(random((6, 4)).double()):
            seen: Tensor = x
            try:
                for step in chain:
                    seen = step(seen)
                seen.mul_(2)
                seen.sub_(1)
            except NotImplementedError as error:
                assert not is_view or "write would be lost" in str(error)  # noqa: PT017
                continue
            except (RuntimeError, IndexError):
                continue  # views that ragged tensors do not have
            num_kept += is_view
            torch.testing.assert_close(whole(x), expected)
    assert num_kept > 20


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_random_views_of_views_are_written_to(seed: int) -> None:
    run_ranks(check_random_writes, 2, seed)


def check_torch_s_muon() -> None:
    """It transposes tall matrices, and writes to the transposed."""
    results = []
    for is_ragged in (True, False):
        values = [random((6, 4)), random((3, 5), seed=1)]
        params = []
        for value in values:
            x = next(iter(layouts_of(value))) if is_ragged else value
            params.append(nn.Parameter(x))
            params[-1].grad = params[-1].detach() * 0.5
        torch.optim.Muon(params, lr=0.1).step()
        results.append([whole(param.detach()) for param in params])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=0.01, rtol=0)  # it rounds to bf16


def test_torch_s_muon() -> None:
    run_ranks(check_torch_s_muon, 2)
