import pytest
import torch
from torch.optim import _muon

from vescale_fsdp.optim.muon_rule import newton_schulz, newton_schulz_cost

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(16, 16), (40, 24), (24, 40), (1, 7), (33, 5)])
def test_the_bits_are_those_of_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape).to(dtype)
    expected = _muon._zeropower_via_newtonschulz(matrix.clone(), COEFFICIENTS, 5, 1e-7)
    found = newton_schulz(matrix, COEFFICIENTS, 5, 1e-7)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_a_matrix_in_bf16_is_not_written_to() -> None:
    matrix = torch.randn(4, 6).bfloat16()
    before = matrix.clone()
    newton_schulz(matrix, COEFFICIENTS, 5, 1e-7)
    assert torch.equal(matrix, before)


def test_singular_values_come_near_to_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(20, 32), COEFFICIENTS, 5, 1e-7).float())
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_zero_matrix_stays_zero() -> None:
    assert not newton_schulz(torch.zeros(3, 5), COEFFICIENTS, 5, 1e-7).any()


def test_what_is_not_finite_gives_nan_and_no_error() -> None:
    matrix = torch.randn(5, 3)
    matrix[2, 1] = float("inf")
    assert newton_schulz(matrix, COEFFICIENTS, 5, 1e-7).isnan().all()


def test_cost() -> None:
    # X X^T: 2 * 2 * 2 * 3 operations, its square 2 * 2 * 2 * 2, its product with X 2 * 2 * 2 * 3.
    assert newton_schulz_cost(2, 3, 1) == newton_schulz_cost(3, 2, 1) == 24 + 16 + 24
    assert newton_schulz_cost(2, 3, 5) == 5 * 64
