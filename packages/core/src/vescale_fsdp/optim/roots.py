"""Roots and eigenbases of Shampoo's preconditioners, on plain matrices.

A matrix gradient ``G`` of shape (m, n) has two statistics, ``left`` = sum of ``G Gᵀ`` (m, m) and
``right`` = sum of ``Gᵀ G`` (n, n). Shampoo multiplies by a root of each, SOAP turns into their
eigenvectors and runs Adam there.

Nothing here raises for what data may hold: an error on the one rank that owns a matrix would
leave all others waiting. NaN or infinity in a matrix gives NaN, as arithmetic does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

_ALIGNMENT = 64  # bytes; torch's own allocations have at least that


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    """The same numbers in row-major order, at an address that is a multiple of 64 bytes.

    What a matrix product rounds to may depend on how its factors lie in memory (small ones on CPUs
    with AVX-512), and in a shard a matrix lies elsewhere than in the whole tensor.
    """
    matrix = matrix.contiguous()
    return matrix if matrix.data_ptr() % _ALIGNMENT == 0 else matrix.clone()


def inverse_root(matrix: torch.Tensor, exponent: float, eps: float) -> torch.Tensor:
    """``(matrix + eps I) ** -exponent`` of a symmetric positive semidefinite matrix.

    Eigenvalues that rounding has made negative are lifted first, all by the same amount, so that
    the smallest is 0 (arXiv 2309.06497, section 3.2). Costs one eigendecomposition.
    """
    values, vectors = _eigh(matrix)  # ascending
    values = values - values[:1].clamp(max=0) + eps
    return (vectors * values.pow(-exponent)) @ vectors.mT


def eigenbasis(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal eigenvectors of a symmetric matrix as columns, largest eigenvalue first."""
    return _eigh(matrix)[1].flip(1)


def refined_basis(matrix: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of power iteration and a QR decomposition (arXiv 2409.11321, algorithm 4).

    Returns:
        The new basis, largest estimated eigenvalue first, and the old column that each of its
        columns comes from.
    """
    product = aligned(matrix) @ aligned(basis)
    estimates = (basis * product).sum(0)
    order = estimates.argsort(descending=True, stable=True)
    product = product[:, order]
    is_finite = product.isfinite().all()
    refined = torch.linalg.qr(product.where(is_finite, torch.zeros_like(product)))[0]
    return refined.where(is_finite, math.nan), order


def _eigh(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, ascending, and eigenvectors; NaN where there are none."""
    is_finite = matrix.isfinite().all()
    usable = matrix.where(is_finite, torch.zeros_like(matrix))
    try:
        values, vectors = torch.linalg.eigh(usable)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # no convergence
        try:
            values, vectors = torch.linalg.eigh(usable.double())
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            values, vectors = usable[0] * math.nan, usable * math.nan
    values, vectors = values.to(matrix.dtype), vectors.to(matrix.dtype)
    return values.where(is_finite, math.nan), vectors.where(is_finite, math.nan)


def accumulate_(statistic: torch.Tensor, grad: torch.Tensor, side: int, beta: float) -> None:
    """Add ``G Gᵀ`` (side 0) or ``Gᵀ G`` (side 1) of a gradient to a moving average, in place.

    With ``beta`` 1 it is a sum instead.
    """
    grad = aligned(grad)
    product = grad @ grad.mT if side == 0 else grad.mT @ grad
    statistic.mul_(beta).add_(product, alpha=weight_of(beta))


def weight_of(beta: float) -> float:
    """The weight of what is new in a moving average; 1 in a sum, which is written ``beta`` 1."""
    return 1 - beta if beta != 1 else 1.0


def is_due(step: int, frequency: int, index: int) -> bool:
    """Whether a matrix refreshes in a step, counted from 1.

    Matrices of different ``index`` do so in different steps, which spreads the cost.
    """
    return (step + index) % frequency == 0


def first_due(frequency: int, index: int) -> int:
    """The first step in which a matrix refreshes after ``frequency - 1`` steps without."""
    return frequency + -index % frequency


# Element by element: the bits do not depend on where a tensor is cut


def update_moments_(
    state: Mapping[str, torch.Tensor], grad: torch.Tensor, betas: tuple[float, float]
) -> None:
    """Adam's moving averages of the gradient and, where there is one, of its square, in place."""
    beta1, beta2 = betas
    state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
    if "exp_avg_sq" in state:
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=weight_of(beta2))


def bias_corrections(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """What the two averages are to be divided by after so many steps; 1 for a sum."""
    beta1, beta2 = betas
    return 1 - beta1**step, 1 - beta2**step if beta2 != 1 else 1.0


def apply_(param: torch.Tensor, direction: torch.Tensor, decay: float, factor: float) -> None:
    """``param = decay * param + factor * direction``, in place.

    A parameter with fewer digits than fp32 is rounded once.
    """
    result = param.float() if param.dtype.itemsize < 4 else param
    result.mul_(decay).add_(direction, alpha=factor)
    if result is not param:
        param.copy_(result)
