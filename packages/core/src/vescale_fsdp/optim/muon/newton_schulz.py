"""Newton-Schulz: the nearest (semi-)orthogonal matrix, about, by products of matrices only.

With X = U S V^T, each step replaces S by a polynomial a S + b S^3 + c S^5 of it. The coefficients
that Muon uses raise small singular values as fast as they can, and leave the others between about
0.7 and 1.2: they never reach 1, and training does not mind.

Source: Keller Jordan's Muon (kellerjordan.github.io/posts/muon); arXiv 2502.16982 for large models.
"""

from __future__ import annotations

import torch


def newton_schulz(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """An orthogonal matrix near ``matrix``, in bf16. The argument stays as it is.

    The bits are those of torch's Muon, which writes into an argument that is bf16 already
    (pytorch#194664).

    Args:
        matrix: [rows, cols], any floating dtype.
        coefficients: a, b and c of the polynomial.
        steps: how often it is applied.
        eps: the least norm to divide by.

    Returns:
        [rows, cols]; where there are more rows than columns, a transposed view. NaN for a matrix
        with a value that is not finite.

    Cost: `newton_schulz_cost`; about four times the matrix in bf16 in memory.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x  # the products are squares of the short side
    x = x / x.norm().clamp(min=eps)  # no singular value is above 1
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def newton_schulz_cost(rows: int, cols: int, steps: int) -> int:
    """Floating-point operations, for `steps` steps on a matrix."""
    short, long = min(rows, cols), max(rows, cols)
    return 2 * steps * short * short * (2 * long + short)
