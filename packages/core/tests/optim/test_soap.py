"""SOAP computes what its paper says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_fsdp.optim import SOAP

from .preconditioning import randn

DOUBLE = torch.float64
LR, BETA1, BETA2, SHAMPOO_BETA, EPS, DECAY, FREQUENCY = 0.01, 0.9, 0.8, 0.7, 1e-8, 0.1, 3
OPTIONS: dict[str, Any] = {
    "lr": LR,
    "betas": (BETA1, BETA2),
    "shampoo_beta": SHAMPOO_BETA,
    "eps": EPS,
    "weight_decay": DECAY,
    "precondition_frequency": FREQUENCY,
}


class Reference:
    """Algorithms 3 and 4 of the paper on one matrix, the average kept in the original space."""

    def __init__(self, weight: Tensor, turn: int = 0) -> None:
        self.weight, self.turn, self.step = weight.clone(), turn, -1
        m, n = weight.shape
        self.left, self.right = (torch.zeros(d, d, dtype=DOUBLE) for d in (m, n))
        self.average, self.squares = torch.zeros_like(weight), torch.zeros_like(weight)

    def __call__(self, grad: Tensor) -> None:
        self.step += 1
        if self.step:
            self._move(grad)
        self.left.mul_(SHAMPOO_BETA).add_((1 - SHAMPOO_BETA) * grad @ grad.mT)
        self.right.mul_(SHAMPOO_BETA).add_((1 - SHAMPOO_BETA) * grad.mT @ grad)
        if not self.step:
            self.bases = [torch.linalg.eigh(s)[1].flip(1) for s in (self.left, self.right)]
        elif (self.step + self.turn) % FREQUENCY == 0:
            for side, statistic in enumerate((self.left, self.right)):
                product = statistic @ self.bases[side]
                order = (self.bases[side].mT @ product).diagonal().argsort(descending=True)
                self.bases[side] = torch.linalg.qr(product[:, order])[0]
                self.squares = self.squares.index_select(side, order)

    def _move(self, grad: Tensor) -> None:
        left, right = self.bases
        turned = left.mT @ grad @ right
        self.average = BETA1 * self.average + (1 - BETA1) * grad
        self.squares = BETA2 * self.squares + (1 - BETA2) * turned**2
        step = (left.mT @ self.average @ right) / (self.squares.sqrt() + EPS)
        scale = (1 - BETA2**self.step) ** 0.5 / (1 - BETA1**self.step)
        self.weight -= LR * (DECAY * self.weight + scale * left @ step @ right.mT)


def test_the_numbers_are_those_of_the_paper() -> None:
    """A matrix, and a stack of two more, whose turns to refresh are the next ones.

    Squares: where the first gradient leaves an eigenvalue of 0 more than once, any basis will do.
    """
    matrix, stack = randn(0, (6, 6), DOUBLE), randn(1, (2, 4, 4), DOUBLE)
    references = [Reference(each, turn) for turn, each in enumerate((matrix, *stack))]
    params = [nn.Parameter(matrix.clone()), nn.Parameter(stack.clone())]
    optimizer = SOAP(params, **OPTIONS)
    for step in range(8):
        for index, param in enumerate(params):
            param.grad = randn(10 * step + index, param.shape, DOUBLE)
        optimizer.step()
        grads = params[0].grad, *params[1].grad
        for reference, grad in zip(references, grads, strict=True):
            reference(grad)
        found = params[0].detach(), *params[1].detach()
        for weight, reference in zip(found, references, strict=True):
            torch.testing.assert_close(weight, reference.weight, rtol=0, atol=1e-10)


def test_the_first_step_only_makes_bases() -> None:
    params = [nn.Parameter(randn(index, shape)) for index, shape in enumerate([(3, 4), (5,)])]
    before = [param.detach().clone() for param in params]
    optimizer = SOAP(params)
    for param in params:
        param.grad = randn(9, param.shape)
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(params, before, strict=True))
    basis = optimizer.state[params[0]]["left_basis"]
    torch.testing.assert_close(basis @ basis.mT, torch.eye(3))


def test_numbers_agree_with_those_of_pytorch_optimizer() -> None:
    """Both sides, one side, and none: (20, 5) has one above 15, (16, 17) two, a vector none."""
    library = pytest.importorskip("pytorch_optimizer")
    shapes = [(6, 6), (7,), (20, 5), (5, 20), (16, 17)]
    params, others = (
        [nn.Parameter(randn(i, shape, DOUBLE)) for i, shape in enumerate(shapes)] for _ in "ab"
    )
    options = OPTIONS | {"weight_decay": 0.0}  # it decays after the step
    ours = SOAP(params, **options, max_precond_dim=15, stagger=False)
    theirs = library.SOAP(others, **options, max_precondition_dim=15)
    for step in range(8):
        for index, (param, other) in enumerate(zip(params, others, strict=True)):
            param.grad = randn(10 * step + index, param.shape, DOUBLE)
            other.grad = param.grad.clone()
        ours.step()
        theirs.step()
    for param, other in zip(params, others, strict=True):
        # It refines bases in single precision, whatever the parameters have.
        torch.testing.assert_close(param, other, rtol=0, atol=1e-6)


def test_a_side_above_max_precond_dim_has_no_states() -> None:
    wide, large, vector = (nn.Parameter(torch.ones(shape)) for shape in [(20, 5), (16, 17), (3,)])
    optimizer = SOAP([wide, large, vector], max_precond_dim=15)
    moments = {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[wide].keys() == moments | {"right", "right_basis"}
    assert optimizer.state[large].keys() == optimizer.state[vector].keys() == moments


def test_averages_start_from_the_first_gradient_of_each_parameter() -> None:
    """A parameter that gets gradients late moves as one of an optimizer that is made then."""
    late, other, alone = (nn.Parameter(randn(seed, (4, 3))) for seed in (0, 1, 0))
    optimizer, fresh = SOAP([late, other], stagger=False), SOAP([alone], stagger=False)
    for step in range(15):
        other.grad = randn(step, (4, 3))
        if step >= 3:
            late.grad, alone.grad = randn(50 + step, (4, 3)), randn(50 + step, (4, 3))
            fresh.step()
        optimizer.step()
    assert torch.equal(late, alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1.0"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers, got \(0\.9,\)"),
        ({"shampoo_beta": 1.5}, r"shampoo_beta must be in \[0, 1\)"),
        ({"precondition_frequency": 0}, "precondition_frequency must be a positive int"),
        ({"max_precond_dim": 2.5}, "max_precond_dim must be a positive int, got 2.5"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SOAP([nn.Parameter(torch.ones(2, 2))], **options)
