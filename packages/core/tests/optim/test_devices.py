"""The same bits on every kind of device, with the kernels that only some of them have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Optimizer

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.optim import flatten_
from vescale_fsdp.testing import run_ranks

from .helpers import local

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = [3, 64, 1, 10_000, 129]
STARTS = [0, 8, 72, 80, 10_080]  # of each; the last two follow each other
Trained = tuple[list[Tensor], list[dict[str, Tensor]]]


def train_by_hand(flatten: Any, device: str, options: dict[str, Any]) -> Trained:
    """Parameters and gradients are views of two tensors that were made by hand."""
    mesh = init_device_mesh("cpu", (1,))
    generator = torch.Generator().manual_seed(0)
    shard, gradients = (torch.randn(10_240, generator=generator).to(device) for _ in range(2))

    def parts_of(flat: Tensor) -> list[RaggedTensor]:
        return [
            RaggedTensor.from_local(
                flat[start : start + size], mesh, [RaggedShard((0,), (1,))], shape=(size,)
            )
            for start, size in zip(STARTS, SIZES, strict=True)
        ]

    params = [nn.Parameter(part) for part in parts_of(shard)]
    optimizer: Optimizer = flatten(AdamW(params, weight_decay=0.1, **options))
    for step in range(4):
        for index, (param, part) in enumerate(zip(params, parts_of(gradients), strict=True)):
            param.grad = None if step == 2 and index == 1 else part
        optimizer.step()
        gradients.mul_(-1.1)
    states = [
        {name: local(value).cpu() for name, value in optimizer.state[param].items()}
        for param in params
    ]
    return [shard.cpu(), gradients.cpu()], states


def check_device(device: str, options: dict[str, Any]) -> None:
    found = train_by_hand(flatten_, device, options)
    expected = train_by_hand(lambda optimizer: optimizer, device, options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cpu", {"foreach": True}),
        pytest.param("cuda", {"foreach": False}, marks=needs_cuda),
        pytest.param("cuda", {"foreach": True}, marks=needs_cuda),
        pytest.param("cuda", {"fused": True}, marks=needs_cuda),
        pytest.param("cuda", {"capturable": True}, marks=needs_cuda),
    ],
)
def test_bits_are_those_of_the_plain_optimizer_on(device: str, options: dict[str, Any]) -> None:
    run_ranks(check_device, 1, device, options)
