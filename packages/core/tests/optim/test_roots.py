"""Roots and eigenbases of symmetric matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vescale_fsdp.optim.roots import (
    accumulate_,
    eigenbasis,
    first_due,
    inverse_root,
    is_due,
    refined_basis,
)

from .preconditioning import randn


def symmetric(length: int, rank: int, seed: int = 0) -> Tensor:
    """Positive semidefinite, [length, length], in double precision."""
    factor = randn(seed, (length, rank), torch.float64)
    return factor @ factor.mT


def test_the_fourth_power_of_an_inverse_root_is_the_inverse() -> None:
    matrix, eps = symmetric(6, 9), 1e-3
    root = inverse_root(matrix, 1 / 4, eps)
    product = torch.linalg.matrix_power(root, 4) @ (matrix + eps * torch.eye(6).double())
    torch.testing.assert_close(product, torch.eye(6).double(), rtol=0, atol=1e-10)


def test_the_least_eigenvalue_of_a_singular_matrix_becomes_eps() -> None:
    root = inverse_root(symmetric(6, 2).float(), 1 / 4, 1e-4)
    largest = torch.linalg.eigvalsh(root)[-1]
    assert largest.item() == pytest.approx(10, rel=1e-3)  # (1e-4) ** -1/4
    assert torch.equal(inverse_root(torch.zeros(2, 2), 1 / 4, 1.0), torch.eye(2))


def test_an_eigenbasis_begins_with_the_largest_eigenvalue() -> None:
    basis = eigenbasis(torch.diag(torch.tensor([1.0, 3.0, 2.0])))
    assert basis.abs().argmax(0).tolist() == [1, 2, 0]


def test_refining_a_basis_leads_to_the_eigenvectors() -> None:
    matrix = torch.diag(torch.tensor([1.0, 16.0, 4.0])).double()
    basis = torch.linalg.qr(randn(0, (3, 3), torch.float64))[0]
    for _ in range(20):
        basis, _ = refined_basis(matrix, basis)
    turned = basis.mT @ matrix @ basis
    torch.testing.assert_close(turned, torch.diag(torch.tensor([16.0, 4, 1]).double()))


def test_refining_says_which_column_each_new_one_comes_from() -> None:
    matrix = torch.diag(torch.tensor([1.0, 3.0, 2.0]))
    basis, order = refined_basis(matrix, torch.eye(3))
    assert order.tolist() == [1, 2, 0]
    assert basis.abs().argmax(0).tolist() == [1, 2, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_gives_nan_without_an_error(value: float) -> None:
    matrix = torch.eye(3)
    matrix[2, 1] = value
    assert inverse_root(matrix, 1 / 4, 1e-8).isnan().all()
    assert eigenbasis(matrix).isnan().all()
    basis, order = refined_basis(matrix, torch.eye(3))
    assert basis.isnan().all()
    assert sorted(order.tolist()) == [0, 1, 2]


def test_a_statistic_is_an_average_or_with_beta_1_a_sum() -> None:
    grad = torch.tensor([[1.0, 2.0]])
    left, right = torch.full((1, 1), 8.0), torch.zeros(2, 2)
    accumulate_(left, grad, 0, 0.75)
    assert left.item() == 0.75 * 8 + 0.25 * 5
    accumulate_(right, grad, 1, 1.0)
    assert right.tolist() == [[1.0, 2.0], [2.0, 4.0]]


def test_matrices_take_turns() -> None:
    """Each refreshes once in three steps, another one in each step."""
    due = [[is_due(step, 3, index) for index in range(3)] for step in range(1, 5)]
    assert due == [
        [False, False, True],
        [False, True, False],
        [True, False, False],
        [False, False, True],
    ]
    assert [first_due(3, index) for index in range(4)] == [3, 5, 4, 3]
