"""The linear algebra of Shampoo and SOAP, on plain matrices: inverse roots and eigenbases.

A gradient ``G`` of shape (m, n) has two statistics: ``left``, the sum of ``G Gᵀ`` (m, m), and
``right``, the sum of ``Gᵀ G`` (n, n). Shampoo multiplies the gradient by inverse roots of them.
SOAP projects it into their eigenbases and runs Adam there.

No value of a matrix makes these functions raise, because an error on the rank that owns a matrix
would leave the other ranks waiting. If a matrix has NaN or infinity, the result is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

_ALIGNMENT = 64  # bytes; torch's own allocations have at least this alignment


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix in row-major order at an address that is a multiple of 64 bytes.

    The rounding of a matrix product can depend on the alignment and strides of its factors (small
    ones on CPUs with AVX-512). These differ between a shard and the full tensor.
    """
    matrix = matrix.contiguous()
    return matrix if matrix.data_ptr() % _ALIGNMENT == 0 else matrix.clone()


def inverse_root(matrix: torch.Tensor, exponent: float, eps: float) -> torch.Tensor:
    """Return ``(matrix + eps I) ** -exponent`` of a symmetric positive semidefinite matrix.

    If rounding has made an eigenvalue negative, a constant is added to all so that the smallest is
    0 (arXiv 2309.06497, section 3.2). Cost: one eigendecomposition.
    """
    values, vectors = _eigh(matrix)  # ascending
    values = values - values[:1].clamp(max=0) + eps
    return (vectors * values.pow(-exponent)) @ vectors.mT


def eigenbasis(matrix: torch.Tensor) -> torch.Tensor:
    """Return the eigenvectors of a symmetric matrix as columns, largest eigenvalue first."""
    return _eigh(matrix)[1].flip(1)


def refined_basis(matrix: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Refine an eigenbasis by power iteration and a QR decomposition (arXiv 2409.11321, alg. 4).

    Returns:
        The new basis, largest estimated eigenvalue first, and for each of its columns the index of
        the old column.
    """
    product = aligned(matrix) @ aligned(basis)
    estimates = (basis * product).sum(0)
    order = estimates.argsort(descending=True, stable=True)
    product = product[:, order]
    is_finite = product.isfinite().all()
    refined = torch.linalg.qr(product.where(is_finite, torch.zeros_like(product)))[0]
    return refined.where(is_finite, math.nan), order


def _eigh(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eigenvalues, ascending, and eigenvectors; NaN if they cannot be computed."""
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

    If ``beta`` is 1, it is a sum.
    """
    grad = aligned(grad)
    product = grad @ grad.mT if side == 0 else grad.mT @ grad
    statistic.mul_(beta).add_(product, alpha=weight_of(beta))


def weight_of(beta: float) -> float:
    """Return the weight of a new value in a moving average; 1 if ``beta`` is 1, for a sum."""
    return 1 - beta if beta != 1 else 1.0


def is_due(step: int, frequency: int, index: int) -> bool:
    """Whether a matrix is refreshed in a step, counted from 1.

    Matrices with different ``index`` are refreshed in different steps, to distribute the cost.
    """
    return (step + index) % frequency == 0


def first_due(frequency: int, index: int) -> int:
    """Return the first step that refreshes a matrix and is not before step ``frequency``."""
    return frequency + -index % frequency


# Element-wise operations. Their results do not depend on how a tensor is sharded.


def update_moments_(
    state: Mapping[str, torch.Tensor], grad: torch.Tensor, betas: tuple[float, float]
) -> None:
    """Update Adam's moving averages of gradient and, if it is in ``state``, of its square."""
    beta1, beta2 = betas
    state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
    if "exp_avg_sq" in state:
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=weight_of(beta2))


def bias_corrections(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """Return the divisors of the two averages after ``step`` steps; 1 for a sum."""
    beta1, beta2 = betas
    return 1 - beta1**step, 1 - beta2**step if beta2 != 1 else 1.0


def apply_(param: torch.Tensor, direction: torch.Tensor, decay: float, factor: float) -> None:
    """Compute ``param = decay * param + factor * direction`` in place.

    A parameter in 16 bits is computed in fp32 and rounded once.
    """
    result = param.float() if param.dtype.itemsize < 4 else param
    result.mul_(decay).add_(direction, alpha=factor)
    if result is not param:
        param.copy_(result)
