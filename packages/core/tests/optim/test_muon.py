"""Muon on one process: what torch's Muon gives for each matrix."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_fsdp import Granularity
from vescale_fsdp.engine.granularity import asked_block
from vescale_fsdp.optim import Muon
from vescale_fsdp.optim.muon_rule import newton_schulz

from .preconditioning import randn


def block_for(*arguments: Any) -> int:
    """The planner's block: 1 where none is asked for."""
    return asked_block(*arguments) or 1


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": torch.tensor(0.02), "weight_decay": 0.0, "adjust_lr_fn": "original"},
    {"momentum": 0.0, "ns_steps": 3, "eps": 1e-3, "ns_coefficients": (2.0, -1.5, 0.5)},
]


def params_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(randn(seed, shape, dtype)) for seed, shape in enumerate(shapes)]


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range = range(3)
) -> None:
    for step in steps:
        for index, param in enumerate(params):
            param.grad = randn(100 * step + index, param.shape, param.dtype)
        optimizer.step()


def train_apart(pieces: list[Tensor], grads: list[list[Tensor]], **options: Any) -> list[Tensor]:
    """torch's Muon on each piece of a parameter as a parameter of its own."""
    params = [nn.Parameter(piece.clone()) for piece in pieces]
    optimizer = torch.optim.Muon(params, **options)
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parameters_and_momentum_are_those_of_torch(options: dict[str, Any]) -> None:
    shapes = (16, 24), (40, 9), (7, 7), (1, 5), (33, 2)
    ours, theirs = params_of(*shapes), params_of(*shapes)
    optimizers = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    train(optimizers[0], ours)
    train(optimizers[1], theirs)
    for param, expected in zip(ours, theirs, strict=True):
        assert torch.equal(param, expected)
        states = (o.state[p] for o, p in zip(optimizers, (param, expected), strict=True))
        found, wanted = states
        assert found.keys() == wanted.keys()
        assert torch.equal(found["momentum_buffer"], wanted["momentum_buffer"])


def test_a_parameter_that_is_not_contiguous_has_the_bits_of_torch() -> None:
    ours, theirs = (nn.Parameter(randn(0, (12, 20)).t()) for _ in range(2))
    for param, optimizer in ((ours, Muon([ours])), (theirs, torch.optim.Muon([theirs]))):
        for step in range(2):
            param.grad = randn(step, (12, 20)).t()
            optimizer.step()
    assert not ours.is_contiguous()
    assert torch.equal(ours, theirs)


def test_stacks_are_matrices_of_their_own() -> None:
    (stack,) = params_of((2, 3, 8, 5))
    pieces = list(stack.detach().clone().view(6, 8, 5))
    train(Muon([stack], lr=0.1), [stack])
    grads = [list(randn(100 * step, (6, 8, 5))) for step in range(3)]
    assert torch.equal(stack.view(6, 8, 5), torch.stack(train_apart(pieces, grads, lr=0.1)))


@pytest.mark.parametrize(("split_rows", "heights"), [([6, 2, 4], [6, 2, 4]), (4, [4, 4, 4])])
def test_rows_are_split_into_matrices(split_rows: Any, heights: list[int]) -> None:
    """Fused projections and heads. The rate of each goes by its own height."""
    (fused,) = params_of((12, 5))
    pieces = list(fused.detach().clone().split(heights))
    train(Muon([{"params": [fused], "split_rows": split_rows}], lr=0.1), [fused])
    grads = [list(randn(100 * step, (12, 5)).split(heights)) for step in range(3)]
    assert torch.equal(fused, torch.cat(train_apart(pieces, grads, lr=0.1)))


def test_rows_of_each_matrix_of_a_stack_are_split() -> None:
    (stack,) = params_of((2, 4, 5))
    flat = nn.Parameter(stack.detach().clone().view(8, 5))
    train(Muon([stack], split_rows=[1, 3]), [stack])
    train(Muon([flat], split_rows=[1, 3, 1, 3]), [flat])
    assert torch.equal(stack.view(8, 5), flat)


def test_momentum_in_bf16_is_the_mean_of_gradients() -> None:
    """torch's Muon divides its momentum by its norm where this has no Nesterov."""
    (param,) = params_of((6, 4), dtype=torch.bfloat16)
    optimizer = Muon([param], nesterov=False)
    expected = torch.zeros_like(param)
    for step in range(3):
        param.grad = randn(step, (6, 4), torch.bfloat16)
        expected.lerp_(param.grad, 1 - 0.95)
        optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], expected)


def test_a_step_in_bf16_is_rounded_once() -> None:
    (param,) = params_of((6, 4), dtype=torch.bfloat16)
    before, grad = param.detach().float(), randn(7, (6, 4), torch.bfloat16)
    optimizer = Muon([param], lr=0.1, weight_decay=0.5)
    param.grad = grad
    optimizer.step()
    momentum = optimizer.state[param]["momentum_buffer"]
    update = newton_schulz(grad.lerp(momentum, 0.95), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    expected = (before * (1 - 0.1 * 0.5)).add(update, alpha=-0.1 * math.sqrt(6 / 4))
    assert torch.equal(param, expected.bfloat16())


def test_values_that_are_not_finite_go_through_as_in_torch() -> None:
    ours, theirs = params_of((4, 6)), params_of((4, 6))
    for param, optimizer in ((ours[0], Muon(ours)), (theirs[0], torch.optim.Muon(theirs))):
        param.grad = torch.ones(4, 6)
        param.grad[1, 2] = float("inf")
        optimizer.step()
    assert ours[0].isnan().all()
    assert theirs[0].isnan().all()


def test_state_dicts_go_from_torch_and_back() -> None:
    shapes = (8, 6), (3, 5)
    expected, ours = params_of(*shapes), params_of(*shapes)
    reference = torch.optim.Muon(expected, lr=0.1)
    train(reference, expected)
    with torch.no_grad():
        for param, value in zip(ours, expected, strict=True):
            param.copy_(value)
    optimizer = Muon(ours, lr=7.0)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 0.1
    train(reference, expected, range(3, 5))
    train(optimizer, ours, range(3, 5))
    returned = torch.optim.Muon(ours)
    returned.load_state_dict(optimizer.state_dict())
    train(reference, expected, range(5, 7))
    train(returned, ours, range(5, 7))
    assert all(map(torch.equal, ours, expected))


def test_a_copy_keeps_its_options() -> None:
    params = params_of((4, 4))
    copied = copy.deepcopy(Muon(params, overlap=False, bucket_bytes=5, split_rows=2))
    assert (copied.overlap, copied.bucket_bytes) == (False, 5)
    assert copied.param_groups[0]["split_rows"] == 2
    train(copied, copied.param_groups[0]["params"])


def test_the_signature_begins_with_that_of_torch() -> None:
    theirs = inspect.signature(torch.optim.Muon).parameters
    ours = inspect.signature(Muon).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


@pytest.mark.parametrize("shape", [(), (5,)])
def test_vectors_are_refused_by_name(shape: tuple[int, ...]) -> None:
    vector = nn.Parameter(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"two or more dimensions, whereas 'norm\.weight' has"):
        Muon([("ok", nn.Parameter(torch.zeros(2, 2))), ("norm.weight", vector)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"lr": torch.zeros(2)}, "Tensor lr must be 1-element"),
        ({"momentum": float("nan")}, "momentum must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"adjust_lr_fn": "other"}, "Adjust learning rate function other is not supported"),
        ({"ns_steps": 100}, "ns_steps in"),
        ({"ns_coefficients": (1.0, 2.0)}, "expected 3 ns_coefficients"),
        ({"split_rows": 4}, r"'fused' of shape \(6, 2\): split_rows=4 does not divide 6 rows"),
        ({"split_rows": [2, 2]}, r"'fused' of shape \(6, 2\): split_rows=\[2, 2\] are not"),
        ({"bucket_bytes": 0}, "bucket_bytes must be positive"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([("fused", nn.Parameter(torch.zeros(6, 2)))], **options)


def test_options_of_a_group_are_checked_as_well() -> None:
    group = {"params": [nn.Parameter(torch.zeros(6, 2))], "lr": -1.0}
    with pytest.raises(ValueError, match=r"Muon: lr must be at least 0, got -1\.0"):
        Muon([group])


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="does not support complex parameters, and parameter 0"):
        Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])


def test_granularity_asks_for_whole_experts_only_if_told() -> None:
    matrix, stack = params_of((6, 4), (3, 6, 4))
    assert block_for(Muon.granularity(), "experts", stack) == 1
    whole = Muon.granularity(whole_experts=True)
    assert block_for(whole, "matrix", matrix) == 1
    assert block_for(whole, "experts", stack) == 24
    assert whole("experts", stack) == Granularity.rows(6)
