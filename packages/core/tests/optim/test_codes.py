"""Codes: the maps are those that others publish, and the code is the nearest one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vescale_fsdp.optim.codes import Codebook, codebook, dynamic_map

CPU = torch.device("cpu")


def numbers(signed: bool) -> Tensor:
    """Numbers of all magnitudes, and those on, just above and just below each midpoint."""
    entries = torch.tensor(dynamic_map(signed))
    middles = ((entries[1:].double() + entries[:-1].double()) / 2).float()
    near = [middles, *(torch.nextafter(middles, torch.tensor(end)) for end in (2.0, -2.0))]
    spread = torch.rand(5000) * 10 ** (-9 * torch.rand(5000))
    even = torch.linspace(0, 1, 1001)
    found = torch.cat([torch.ones(1), *near, spread, even, torch.tensor([1e-40, -0.0])])
    return torch.cat([found, -found]) if signed else found.abs()


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_is_the_nearest_and_ties_go_to_the_larger(signed: bool) -> None:
    entries = torch.tensor(dynamic_map(signed)).double()
    x = numbers(signed)
    codes, scales = codebook(signed, CPU).encode(x[None])
    assert scales.tolist() == [1.0]
    distance = (x.double()[:, None] - entries).abs()
    # The last of the nearest: argmin takes the first.
    nearest = len(entries) - 1 - distance.flip(1).argmin(1)
    assert torch.equal(codes[0].long(), nearest)


@pytest.mark.parametrize(
    ("signed", "smallest", "parts"), [(True, 0.55e-6, 64), (False, 0.325e-6, 128)]
)
def test_the_map_has_seven_decades_that_double(signed: bool, smallest: float, parts: int) -> None:
    entries = dynamic_map(signed)
    positive = [entry for entry in entries if entry > 0]
    assert len(entries) == 256
    assert list(entries) == sorted(set(entries))
    # The lowest decade is 1e-7 to 1e-6: of one part the middle is 5.5e-7, of two 3.25e-7.
    assert positive[0] == pytest.approx(smallest, rel=1e-6)
    assert sum(0.1 < entry < 1 for entry in entries) == parts
    assert max(entries) == 1
    assert min(entries) == pytest.approx(-1 + 0.9 / 128 if signed else 0)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_torchao(signed: bool) -> None:
    utils = pytest.importorskip("torchao.optim.quant_utils")
    theirs = torch.tensor(utils.create_dynamic_map(signed))
    # Theirs are sums of float32 numbers; one unit in the last place is 1.2e-7.
    torch.testing.assert_close(torch.tensor(dynamic_map(signed)), theirs, rtol=2.4e-7, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(signed=signed)
    torch.testing.assert_close(torch.tensor(dynamic_map(signed)), theirs, rtol=2.4e-7, atol=0)


def test_each_block_has_a_scale_of_its_own() -> None:
    x = torch.tensor([[0.0, 0.5, -2.0], [1e-20, 0.0, 0.0], [3e8, 3.0, 0.0]])
    codes, scales = codebook(True, CPU).encode(x)
    assert scales.tolist() == [2.0, pytest.approx(1e-12), 3e8]  # 1e-12 is the smallest scale
    decoded = codebook(True, CPU).decode(codes, scales)
    # The middle of the part around 1/4, which is 0.9 / 64 wide; and the entry next to -1.
    assert decoded[0].tolist() == pytest.approx([0.0, 0.5, -2.0 * (1 - 0.9 / 128)], abs=0.9 / 64)
    assert decoded[1].tolist() == [0.0, 0.0, 0.0]
    assert decoded[2].tolist() == [3e8, 0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(bad: float) -> None:
    x = torch.tensor([[1.0, bad, 0.0], [1.0, 0.5, 0.0]])
    book = codebook(True, CPU)
    decoded = book.decode(*book.encode(x))
    assert bool(decoded[0].isnan().all())
    assert bool(decoded[1].isfinite().all())


@pytest.mark.parametrize("signed", [True, False])
def test_zeros_have_the_code_of_zero(signed: bool) -> None:
    book = Codebook(signed, CPU)
    codes, scales = book.encode(torch.zeros(1, 4))
    assert codes.tolist() == [[book.zero] * 4]
    assert scales.tolist() == [pytest.approx(1e-12)]
