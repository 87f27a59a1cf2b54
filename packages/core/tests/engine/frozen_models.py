"""A model of which parts are frozen after it was sharded, and what its steps are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import fully_shard

from .helpers import assert_bit_equal, averaged_gradients, full_gradients

Plan = Callable[[str], bool]  # which parameters are trained, by name
WIDTH = 32


class MLP(nn.Module):
    """Of the sizes of FSDP2's own test."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 4 * width)
        self.out_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(torch.relu(self.in_proj(x)))


def made(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(42)
    return nn.Sequential(*(MLP(width) for _ in range(3)))


def sharded(model: nn.Sequential, shard: Any = fully_shard, **options: Any) -> nn.Sequential:
    for mlp in model:
        shard(mlp, **options)
    shard(model, **options)
    return model


def inputs(step: int, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, width, generator=generator)


def set_trainable(model: nn.Module, wanted: Plan) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(wanted(name))


def is_bias(name: str) -> bool:
    return "bias" in name


def is_any(name: str) -> bool:
    return True


def not_first(name: str) -> bool:
    return not name.startswith("0.in_proj.weight")


def backward(model: nn.Module, step: int) -> None:
    model(inputs(step, 5)).square().sum().backward()


def check_gradients(model: nn.Module, plain: nn.Module, bits: bool = True) -> None:
    """With ``bits``, bit for bit where the order of a sum over ranks does not matter."""
    found, expected = full_gradients(model), averaged_gradients(plain)
    if bits and dist.get_world_size() <= 2:
        assert_bit_equal(found, expected)
        return
    for name, tensor in expected.items():
        other = found[name]
        if tensor is None or other is None:
            assert tensor is other, name
        else:
            torch.testing.assert_close(other, tensor, rtol=1e-5, atol=1e-6)
