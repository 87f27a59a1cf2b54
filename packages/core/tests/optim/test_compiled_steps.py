"""``torch.compile(optimizer.step)`` gives what it gives on one process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat, fully_shard
from vescale_fsdp.testing import run_ranks

pytestmark = pytest.mark.filterwarnings(  # of torch's own modules, when Dynamo imports them
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw loop": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "sgd loop": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=False),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=True),
}


def make() -> nn.Module:
    """On two ranks each holds nothing of some parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1))


def trained(model: nn.Module, which: str, parts: slice, backend: str) -> list[torch.Tensor]:
    torch._dynamo.reset()
    optimizer = OPTIMIZERS[which](model.parameters())
    step = torch.compile(optimizer.step, backend=backend)
    batch = torch.randn(3, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    for halves in batch:
        for half in halves[parts]:
            loss = model(half).square().mean()
            (loss / len(halves[parts])).backward()
        step()
        optimizer.zero_grad()
    params = [param.detach() for param in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in params]


def check(sharding: Any, which: str, backend: str) -> None:
    rank = torch.distributed.get_rank()
    expected = trained(make(), which, slice(2), backend)
    model = fully_shard(make(), sharding=sharding)
    found = trained(model, which, slice(rank, rank + 1), backend)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("sharding", ["zero3", "zero1", "ddp"])
def test_steps(sharding: str, which: str) -> None:
    run_ranks(check, 2, sharding, which, "aot_eager")


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", ["zero3", "ddp"])
def test_steps_of_generated_kernels(sharding: str) -> None:
    run_ranks(check, 2, sharding, "adamw loop", "inductor", timeout_s=110)


def check_written_by_a_kernel() -> None:
    model = fully_shard(nn.Linear(6, 5), reshard_after_forward=False)
    assert isinstance(model, nn.Linear)
    x = torch.ones(1, 6)
    with torch.no_grad():
        assert model(x).count_nonzero()
        for param in model.parameters():
            local = compat.local_tensor(param)
            with compat.preserve_versions(local):
                local.zero_()
            torch.autograd.graph.increment_version(param)  # as compiled code does, on this alone
        assert not model(x).count_nonzero()


def test_a_forward_sees_what_a_kernel_has_written() -> None:
    run_ranks(check_written_by_a_kernel, 2)
