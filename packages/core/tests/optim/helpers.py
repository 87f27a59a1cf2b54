"""Two equal sharded models: one with a flattened optimizer and one with a plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from vescale_fsdp import fully_shard
from vescale_fsdp.optim import flat as pieces
from vescale_fsdp.optim import flatten_

MakeOptimizer = Callable[[nn.Module], Optimizer]
Training = tuple[nn.Module, Optimizer]


class Net(nn.Module):
    """Sizes that leave gaps and sizes that do not, a scalar, and what is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, skip: bool = False) -> Tensor:  # [batch, 5] -> [batch, 3]
        x = torch.cat([self.first(x), x[:, :1]], 1)
        for index, layer in enumerate(self.middle):
            if not (skip and index == 1):
                x = torch.tanh(layer(x))
        return self.last(x) * self.scale


def make_net(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, shard: Any = fully_shard, **options: Any
) -> nn.Module:
    """Three units: the first layer, those in the middle, and the rest."""
    torch.manual_seed(seed)
    net = Net().to(dtype)
    shard(net.first, **options)
    shard(list(net.middle), **options)
    shard(net, **options)
    return net


def make_adamw(net: nn.Module, **options: Any) -> Optimizer:
    return AdamW(net.parameters(), lr=0.05, weight_decay=0.1, **options)


def backward(net: nn.Module, step: int, *, skip: bool = False) -> Tensor:
    """Add the gradients of the batch of a step, which is the same on every rank."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    loss: Tensor = net(x.to(net.scale.dtype), skip=skip).square().sum()
    loss.backward()
    return loss


def train(net: nn.Module, optimizer: Optimizer, steps: range, skip: tuple[int, ...] = ()) -> None:
    """One layer in the middle is not used in the steps of ``skip``."""
    for step in steps:
        optimizer.zero_grad()
        backward(net, step, skip=step in skip)
        optimizer.step()


def pair(make_optimizer: MakeOptimizer = make_adamw, **options: Any) -> tuple[Training, Training]:
    """A model with a flattened optimizer, and one with a plain one."""
    flat, plain = make_net(**options), make_net(**options)
    return (flat, flatten_(make_optimizer(flat))), (plain, make_optimizer(plain))


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_of(param: Tensor) -> Tensor:
    """The whole shard in which the local part lies, gaps included."""
    part = local(param).detach()
    return torch.empty(0, dtype=part.dtype).set_(part.untyped_storage())


def assert_same(found: Training, expected: Training) -> None:
    """Shards, gradients and states are the same, bit for bit; so are the names of the states."""
    (net, optimizer), (plain, plain_optimizer) = found, expected
    for (name, param), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(storage_of(param), storage_of(other)), f"the shard of {name}"
        assert (param.grad is None) == (other.grad is None), name
        if other.grad is not None:
            assert torch.equal(local(param.grad), local(other.grad)), f"the gradient of {name}"
        state, wanted = (o.state.get(p) for o, p in ((optimizer, param), (plain_optimizer, other)))
        assert (state is None) == (wanted is None), name
        assert list(state or {}) == list(wanted or {}), name
        for key, value in (wanted or {}).items():
            assert type(state[key]) is type(value), f"{key} of {name}"
            if value is not None:
                assert torch.equal(local(state[key]), local(value)), f"{key} of {name}"
    assert len(optimizer.state) == len(plain_optimizer.state)


@contextmanager
def long_from(num_elements: int) -> Iterator[None]:
    """Segments of so many elements are long."""
    before, pieces._LONG = pieces._LONG, num_elements
    try:
        yield
    finally:
        pieces._LONG = before
