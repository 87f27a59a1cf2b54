"""What becomes a number of Python is that of the whole tensor, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import distributed, make_mesh, random


def check_numbers() -> None:
    whole = random()
    for (x,) in distributed(whole):
        for found, expected in [
            (x.norm().item(), whole.norm().item()),
            (float(x.sum()), whole.sum().item()),
            (x.mean().item(), whole.mean().item()),
            ((x.sum() * 2 + x.sum()).item(), 3 * whole.sum().item()),
            (float(x.sum(0)[3]), whole.sum(0)[3].item()),
            (torch._foreach_norm([x])[0].item(), whole.norm().item()),
            (int((x > 0).sum()), int((whole > 0).sum())),
            (int(torch.count_nonzero(x > 0)), int((whole > 0).sum())),
            (bool((x > 2).sum()), bool((whole > 2).any())),
            (x.max().item(), whole.max().item()),
            (x[2:3].sum().item(), whole[2].sum().item()),
            (nn.utils.get_total_norm([x]).item(), whole.norm().item()),
        ]:
            assert found == pytest.approx(expected, rel=1e-5)
        flag = torch.zeros_like(x)
        flag[5, :] = 1.0  # on one rank only
        assert flag.sum()
        assert not (flag * 0).sum()
        assert format(float(x.norm()), ".3f") == f"{whole.norm():.3f}"


@pytest.mark.parametrize("world_size", [2, 3])
def test_numbers_of_reductions_are_global(world_size: int) -> None:
    run_ranks(check_numbers, world_size)


def check_inference_mode() -> None:
    with torch.inference_mode():
        for (x,) in distributed(random()):
            for placed in (x.sum(), x.max(), x.norm()):
                assert placed.item() == pytest.approx(placed.full_tensor().item())
        x = RaggedTensor.distribute(torch.tensor(2.5), make_mesh(), [RaggedShard.owner(1, 2)])
        assert x.item() == 2.5


def test_in_inference_mode() -> None:
    run_ranks(check_inference_mode, 2)


def check_one_element() -> None:
    mesh = make_mesh()
    for shape in ((), (1,), (1, 1)):
        for owner in range(2):
            x = RaggedTensor.distribute(torch.full(shape, 2.5), mesh, [RaggedShard.owner(owner, 2)])
            assert (x.item(), float(x), int(x), bool(x)) == (2.5, 2.5, 2, True)
    for (x,) in distributed(random()):
        with pytest.raises(RuntimeError, match="96 elements cannot be converted to Scalar"):
            x.item()
        with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
            bool(x)


def test_a_ragged_tensor_of_one_element() -> None:
    run_ranks(check_one_element, 2)
