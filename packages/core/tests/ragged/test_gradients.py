"""Gradients through operators on ragged tensors: the dense ones, in the layout of the tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import distributed, make_mesh, random
from .layouts import Results, composed, layouts_of, same, whole_of

POINTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arithmetic": lambda x, y: (2 - x) * y / (y * y + 1) + x.neg(),
    "power": lambda x, y: x**2 + x.abs().sqrt() + x.exp(),
    "where": lambda x, y: torch.where(x > y, x * y, y - x),
    "where with a number": lambda x, y: torch.where(x > 0, x, 0.5) * y,
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 2.0) * y,
    "masked_fill_": lambda x, y: (x * 1).masked_fill_(x > 0, -1.0) + y,
    "clamp": lambda x, y: x.clamp(-0.5, 0.5) * y.clamp(min=0.1),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3) + torch.lerp(y, x, x),
    "maximum": lambda x, y: torch.maximum(x, y) - torch.minimum(x, 2 * y),
    "activations": lambda x, y: torch.relu(x) + torch.sigmoid(y) + torch.tanh(x) * y.sin(),
    "casts": lambda x, y: x.double().float() + y.bfloat16().float(),
    "copies": lambda x, y: x.clone() + y.contiguous() + torch.zeros_like(x).copy_(y),
    "in place": lambda x, y: (x * 2).mul_(y).add_(x, alpha=3).clamp_(max=1.0),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y * y + 1, value=0.3).addcmul(x, y),
}

REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "sum in double": lambda x: x.sum(dtype=torch.float64).float(),
    "max": lambda x: x.max(),
    "amin": lambda x: x.amin(),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3),
    "norm inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "squares": lambda x: x.pow(2).sum(),
    "sum of rows": lambda x: x.sum(1).pow(2).sum(),
    "sum of columns": lambda x: whole_of(x.sum(0)).pow(2).sum(),
    "mean kept": lambda x: (x.mean(1, keepdim=True) * 3).pow(2).sum(),
    "largest of rows": lambda x: x.amax(1).sum(),
    "largest of columns": lambda x: whole_of(x.amax(0)).pow(2).sum(),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, dim=1).pow(2).sum(),
    "norm of columns": lambda x: whole_of(torch.linalg.vector_norm(x, dim=0)).pow(3).sum(),
    "deviation": lambda x: x.std() + x.var(),
    "deviation of rows": lambda x: x.var(1).pow(2).sum(),
    "deviation of columns": lambda x: whole_of(x.std(0)).sum(),
    "standardised": lambda x: ((x - x.mean()) / x.std()).exp().sum(),
    "normalised": lambda x: (x / x.norm()).exp().sum(),
    "normalised rows": lambda x: (x / x.norm(dim=1, keepdim=True)).exp().sum(),
    "centred": lambda x: (x - x.mean()).pow(2).sum() + (x - x.mean(0)).pow(2).mean(),
}

PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1).pow(2).sum(),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1).pow(2).sum(),
    "reshape": lambda x: x.reshape(3, 2, 2).exp().sum(),
    "slice": lambda x: x[1:3].pow(2).sum(),
    "index": lambda x: x[1].exp().sum() + x[3].sum(),
    "overlapping slices": lambda x: (x[0:3] * 2).pow(2).sum() + x[2:4].pow(3).sum(),
    "slice of what was computed": lambda x: (x * 3)[1:].pow(2).sum(),
    "slice of a slice": lambda x: x[1:][1:].pow(2).sum(),
    "sum of a part": lambda x: x[1:3].sum(),
    "split": lambda x: sum(part.pow(i + 2).sum() for i, part in enumerate(x.split([1, 3]))),
    "one of the chunks": lambda x: x.chunk(2)[1].pow(2).sum(),
    "unbind": lambda x: sum(row.pow(i + 1).sum() for i, row in enumerate(x.unbind())),
    "one of the rows": lambda x: (x * 2).unbind()[2].exp().sum(),
    "all of it": lambda x: x[0:4].pow(2).sum(),
}


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def check_gradient(
    x: RaggedTensor,
    whole: Tensor,
    loss: Callable[[Tensor], Tensor],
    name: str,
    results: Results | None = None,
) -> None:
    ragged, dense = leaf(x), leaf(whole)
    whole_of(loss(ragged)).backward()
    loss(dense).backward()
    grad = ragged.grad
    assert type(grad) is RaggedTensor, name
    assert grad.ragged_placement.cuts_like(x.ragged_placement), name
    if results is None:
        same(grad, dense.grad, name, rtol=1e-5)
    else:
        results.add(grad, dense.grad, (name, x.placements))


def check_pointwise() -> None:
    whole_x, whole_y = random((4, 3)), random((4, 3), seed=1)
    results = Results()
    for x, y in zip(layouts_of(whole_x), layouts_of(whole_y), strict=True):
        for name, operator in POINTWISE.items():
            pairs = [(leaf(x), leaf(y)), (leaf(whole_x), leaf(whole_y))]
            for first, second in pairs:
                whole_of(operator(first, second)).pow(2).sum().backward()
            for tensor, dense in zip(*pairs, strict=True):
                if dense.grad is None:
                    assert tensor.grad is None, name
                else:
                    results.add(tensor.grad, dense.grad, (name, x.placements))
            results.add(operator(x, y), operator(whole_x, whole_y), (name, x.placements))
    results.check(rtol=1e-5)


def test_of_pointwise_operators() -> None:
    run_ranks(check_pointwise, 2)


def check_reduced() -> None:
    whole, results = random((4, 3)), Results()
    for x in layouts_of(whole):
        for name, loss in REDUCED.items():
            check_gradient(x, whole, loss, name, results)
    results.check(rtol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_of_reductions(world_size: int) -> None:
    run_ranks(check_reduced, world_size)


def check_parts() -> None:
    whole, results = random((4, 3)), Results()
    for x in layouts_of(whole):
        for name, loss in PARTS.items():
            check_gradient(x, whole, loss, name, results)
    results.check(rtol=1e-5)


@pytest.mark.parametrize("world_size", [2, 3])
def test_of_views_and_parts(world_size: int) -> None:
    run_ranks(check_parts, world_size)


def check_composed() -> None:
    whole = random((4, 6, 2))
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.pow(2).sum() + x.norm() + x.view(4, 6, 2, 1).mean() + x.max(),
        lambda x: (
            whole_of(x.sum(2, keepdim=True)).pow(2).sum() + whole_of(x.sum((1, 2)).exp().sum())
        ),
        lambda x: whole_of(x.amax(1)).pow(2).sum(),
        lambda x: x[1:3].pow(2).sum(),
    ]
    for x in composed(whole):
        sharded = [p.dim for p in x.placements if type(p) is Shard]
        for number, loss in enumerate(losses):
            if number == 3 and 0 in sharded:
                with pytest.raises(NotImplementedError, match="another axis of the mesh shards"):
                    loss(x)
            else:
                check_gradient(x, whole, loss, str(x.placements))


def test_beside_other_placements() -> None:
    run_ranks(check_composed, 4)


# --- the loss itself is partial -------------------------------------------------------------------


def check_penalty() -> None:
    """What a training loop adds to its loss; the sum over parameters is a partial DTensor."""
    wholes = [random((4, 3)), random((5,), seed=1), random((), seed=2)]
    for tensors in zip(*(list(layouts_of(whole))[:1] * 2 for whole in wholes), strict=True):
        parameters = [nn.Parameter(x.detach().clone()) for x in tensors]
        loss = sum(p.pow(2).sum() for p in parameters)
        loss.backward()
        loss = 0.5 * sum(p.sum() for p in parameters) + sum(p.norm() for p in parameters)
        loss.backward()
        for p, whole in zip(parameters, wholes, strict=True):
            assert type(p.grad) is RaggedTensor
            assert p.grad.placements == p.placements
            same(p.grad, 2 * whole + 0.5 + whole / whole.norm(), rtol=1e-5)
        torch.optim.AdamW(parameters).step()


def test_backward_of_a_penalty_gives_ragged_gradients() -> None:
    run_ranks(check_penalty, 2)


def check_autograd_grad() -> None:
    whole = random((4, 3))
    for x in layouts_of(whole):
        parameter = leaf(x)
        (grad,) = torch.autograd.grad(parameter.sum(), parameter)
        assert type(grad) is RaggedTensor
        same(grad, torch.ones(4, 3))
        (grad,) = torch.autograd.grad(parameter.pow(3).sum(), parameter, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), parameter)
        same(second, 6 * whole, rtol=1e-5)


def test_autograd_grad_and_second_derivatives() -> None:
    run_ranks(check_autograd_grad, 2)


def check_hooks() -> None:
    """One hook per tensor and node, however often the tensor is reduced."""
    (x, *_) = layouts_of(random((4, 3)))
    parameter = leaf(x)
    for _ in range(3):
        parameter.sum()
    assert len(parameter._backward_hooks) == 1
    computed = parameter * 1
    computed.sum()
    computed.mul_(2)  # another node now
    computed.sum().backward()
    same(parameter.grad, torch.full((4, 3), 2.0))


def test_hooks_do_not_pile_up() -> None:
    run_ranks(check_hooks, 2)


# --- of what stands beside ragged tensors ---------------------------------------------------------


def check_replicated_operands() -> None:
    mesh, whole = make_mesh(), random((4, 3))
    for x in layouts_of(whole):
        for shape in [(4, 3), (3,), (4, 1), (1, 1), ()]:
            value = random(shape, seed=3)
            grads = []
            for ragged in (True, False):
                data = leaf(x if ragged else whole)
                other = leaf(
                    DTensor.from_local(value, mesh, [Replicate()], run_check=False)
                    if ragged
                    else value
                )
                loss = (data * other + other).pow(2).sum() + other.sum()
                whole_of(loss).backward()
                grads.append((data.grad, other.grad))
            (data_grad, other_grad), expected = grads
            assert type(data_grad) is RaggedTensor
            assert isinstance(other_grad, DTensor)
            assert other_grad.placements[0] in (Replicate(), Partial())
            same(data_grad, expected[0], rtol=1e-5)
            same(other_grad, expected[1], shape, rtol=1e-5)


def test_of_replicated_operands() -> None:
    run_ranks(check_replicated_operands, 2)


def check_plain_operand() -> None:
    for x in layouts_of(random((4, 3))):
        factor = torch.tensor(2.0, requires_grad=True)
        whole_of((x * factor).pow(2).sum()).backward()
        assert type(factor.grad) is Tensor
        torch.testing.assert_close(factor.grad, 4 * random((4, 3)).pow(2).sum())


def test_of_a_plain_number_is_that_of_all_ranks() -> None:
    run_ranks(check_plain_operand, 2)


def check_module() -> None:
    """A gate that every rank has, and a sharded tensor, in one small model."""
    mesh = make_mesh()
    x = RaggedTensor.distribute(random((4, 3)), mesh, [RaggedShard((0, 1), (5, 7))])
    gate = nn.Parameter(DTensor.from_local(random((3,), seed=1), mesh, [Replicate()]))
    weight = nn.Parameter(x)
    loss = (torch.tanh(weight) * torch.sigmoid(gate)).pow(2).mean()
    loss.full_tensor().backward()
    dense_gate, dense = leaf(random((3,), seed=1)), leaf(random((4, 3)))
    (torch.tanh(dense) * torch.sigmoid(dense_gate)).pow(2).mean().backward()
    same(weight.grad, dense.grad)
    same(gate.grad, dense_gate.grad)
    torch.optim.SGD([weight, gate], lr=0.1, foreach=True).step()
    same(weight.detach(), random((4, 3)) - 0.1 * dense.grad)
    same(gate.detach(), random((3,), seed=1) - 0.1 * dense_gate.grad)


def test_one_optimizer_steps_ragged_and_replicated_parameters() -> None:
    run_ranks(check_module, 2)


def check_memory_of_gradient() -> None:
    for (x,) in distributed(random()):
        p = nn.Parameter(x)
        p.sum().backward()
        assert p.grad.to_local().stride() == (1,)  # not one number, expanded
        torch.optim.SGD([p], lr=1.0, fused=True).step()
        torch.testing.assert_close(p.full_tensor(), random() - 1)


def test_a_fused_optimizer_may_read_the_gradient_of_a_sum() -> None:
    run_ranks(check_memory_of_gradient, 2)
