"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners.

Source: arXiv 2409.11321, and the authors' published code for details that are not in the paper: the
first step changes no parameter, and a gradient is projected with the basis from before this
gradient.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from vescale_fsdp.optim.base import Group, Params
from vescale_fsdp.optim.preconditioned import MatrixPart, Preconditioned, check_options
from vescale_fsdp.optim.roots import (
    accumulate_,
    aligned,
    bias_corrections,
    eigenbasis,
    is_due,
    refined_basis,
    update_moments_,
)

_SIDES = ("left", "right")


class SOAP(Preconditioned):
    """SOAP for sharded and for plain parameters, with the same numbers.

    A matrix ``G`` (m, n) has statistics ``left`` (m, m) and ``right`` (n, n), moving averages of
    ``G Gᵀ`` and ``Gᵀ G``, and bases of their eigenvectors; Adam runs on ``G`` projected into these
    bases. A basis is refreshed by one step of power iteration and a QR decomposition. In a stack of
    matrices (three dimensions and more) each is a matrix. Sides longer than
    ``max_precond_dim`` are not projected. Matrices with two such sides, and vectors, use
    Adam. The first gradient of a parameter only makes its bases.

    Each matrix has an owner, which computes it as a whole. Owners are assigned by cost; those of
    one stack in the order of the ranks. Replicas (HSDP) compute the same.

    Args:
        params: parameters, (name, parameter) pairs or groups.
        lr: learning rate, a number or a tensor.
        betas: decay of the averages of gradient and square, both in the eigenbasis.
        shampoo_beta: decay of the statistics; ``betas[1]`` if None.
        eps: added to the root of the squares.
        weight_decay: decoupled, as in AdamW.
        precondition_frequency: steps from one refresh of a basis to the next.
        max_precond_dim: the longest side that has a basis.
        stagger: matrices refresh in different steps, by their number among all matrices of this
            optimizer; else all do at the same time, as in the authors' code.

    State: ``step``; ``exp_avg``, ``exp_avg_sq`` of the parameter's shape and, for each side of
    length d, ``left``, ``left_basis``, ``right``, ``right_basis`` of (d, d), all in fp32 at least
    and all on the owner: 8 (m n + m² + n²) bytes. Averages of parameters without a basis are
    sharded as the parameter. Each is a DTensor, so a checkpoint loads on other ranks.

    Cost of a step: gradients are sent to the owners in their dtype, updates back in fp32, except
    for matrices that are whole on their owner; 6 m n (m + n) floating-point operations a matrix
    and, for each refresh of a side, about 4 d³ and 4 m n d to project the average.

    Raises:
        ValueError: an option is out of range, or a parameter is a plain tensor from `to_local`.
    """

    fixed_options: ClassVar[frozenset[str]] = frozenset({"max_precond_dim"})

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10_000,
        stagger: bool = True,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
            "stagger": stagger,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Group) -> None:
        check_options(type(self).__name__, group, "max_precond_dim")
        beta = group["shampoo_beta"]
        if beta is not None and not 0 <= beta < 1:
            raise ValueError(f"SOAP: shampoo_beta must be in [0, 1), got {beta}")

    def matrix_states(
        self, rows: int, matrix: tuple[int, int], group: Group
    ) -> dict[str, tuple[int, ...]]:
        assert rows == matrix[0], "an owner has whole matrices"
        states: dict[str, tuple[int, ...]] = {"exp_avg": matrix, "exp_avg_sq": matrix}
        for name, length in zip(_SIDES, matrix, strict=True):
            if length <= group["max_precond_dim"]:
                states[name] = states[f"{name}_basis"] = (length, length)
        return states if len(states) > 2 else {}

    def cost(self, matrix: tuple[int, int], group: Group) -> int:
        m, n = matrix
        sides = [d for d in matrix if d <= group["max_precond_dim"]]
        refresh = sum(4 * d**3 + 4 * m * n * d for d in sides)
        return sum(6 * m * n * d for d in sides) + refresh // int(group["precondition_frequency"])

    def moves(self, step: int) -> bool:
        return step > 1

    def scale(self, group: Group, step: int) -> float:
        first, second = bias_corrections(group["betas"], step - 1)
        return math.sqrt(second) / first

    def direction(
        self, part: MatrixPart, grad: torch.Tensor, group: Group, step: int
    ) -> torch.Tensor:
        update_moments_(part.state, _turned(part, grad), group["betas"])
        denominator = part.state["exp_avg_sq"].sqrt().add_(group["eps"])
        return _turned_back(part, part.state["exp_avg"] / denominator)

    def learn(self, part: MatrixPart, grad: torch.Tensor, group: Group, step: int) -> None:
        sides = [(side, name) for side, name in enumerate(_SIDES) if name in part.state]
        beta = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
        for side, name in sides:
            accumulate_(part.state[name], grad, side, beta)
        if step == 1:
            for _, name in sides:
                part.state[f"{name}_basis"].copy_(eigenbasis(part.state[name]))
        elif sides and is_due(step - 1, group["precondition_frequency"], part.turn):
            _refresh(part, sides)


def _turned(part: MatrixPart, matrix: torch.Tensor) -> torch.Tensor:
    """Project a matrix into the eigenbases."""
    if "left" in part.state:
        matrix = aligned(part.state["left_basis"]).mT @ aligned(matrix)
    return aligned(matrix) @ aligned(part.state["right_basis"]) if "right" in part.state else matrix


def _turned_back(part: MatrixPart, matrix: torch.Tensor) -> torch.Tensor:
    """Project a matrix from the eigenbases back."""
    if "left" in part.state:
        matrix = aligned(part.state["left_basis"]) @ aligned(matrix)
    if "right" in part.state:
        matrix = aligned(matrix) @ aligned(part.state["right_basis"]).mT
    return matrix


def _refresh(part: MatrixPart, sides: list[tuple[int, str]]) -> None:
    """Refine the bases. The average is projected into the new ones; squares are reordered only."""
    state = part.state
    average = _turned_back(part, state["exp_avg"])
    squares = state["exp_avg_sq"]
    for side, name in sides:
        basis, order = refined_basis(state[name], state[f"{name}_basis"])
        state[f"{name}_basis"].copy_(basis)
        squares = squares.index_select(side, order)
    state["exp_avg_sq"].copy_(squares)
    state["exp_avg"].copy_(_turned(part, average))
