"""A small model and its training, the same on any number of ranks."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vescale_fsdp import Granularity, fully_shard
from vescale_fsdp.checkpoint.manifest import (
    NAME,
    Chunk,
    Manifest,
    Seal,
    Span,
    TensorEntry,
    Variant,
)

State = dict[str, Tensor]


class Net(nn.Module):
    """Two units, a scalar, and a layer that is never used and so has no optimizer state."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


def make(
    granularity: Granularity | None = None, seed: int = 0, width: int = 7
) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Net(width)
    for layer in (model.layers[0], model.layers[2]):
        fully_shard(layer, granularity=granularity)
    fully_shard(model, granularity=granularity)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same batch on every rank, so that the number of ranks does not matter."""
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen += step


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """All parameters, buffers and optimizer states, whole, by name."""
    state: State = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, param in model.named_parameters():
        state[name] = param.full_tensor().detach()
        for key, value in optimizer.state.get(param, {}).items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[f"{name}/{key}"] = whole.detach().clone()
    return state


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of the bits that this rank holds, of options, and of the generators."""
    total = hashlib.sha256(repr(random.getstate()).encode())
    total.update(bytes(torch.get_rng_state().tolist()))
    for name, param in [*model.named_parameters(), *model.named_buffers()]:
        _update(total, name, param)
        for key, value in sorted(optimizer.state.get(param, {}).items()):
            _update(total, f"{name}/{key}", value)
    for group in optimizer.param_groups:
        total.update(repr({k: v for k, v in group.items() if k != "params"}).encode())
    return total.hexdigest()


def _update(total: Any, name: str, value: Tensor) -> None:
    local = value.to_local() if hasattr(value, "to_local") else value
    total.update(name.encode())
    total.update(bytes(local.detach().contiguous().view(-1).view(torch.uint8).tolist()))


def small_manifest() -> Manifest:
    """A matrix of two boxes on two ranks, a scalar, and two values."""
    first, second = "rank-00000.bin", "rank-00001.bin"
    return Manifest(
        Seal("ab" * 16, 3, 100, "2025-01-01T00:00:00+00:00"),
        world_size=2,
        software={"torch": "2.13.0"},
        files={first: 4 * 6 + 2 + 2, second: 4 * 9 + 4},
        tensors={
            "model.w": TensorEntry(
                "float32",
                (5, 3),
                (
                    Chunk((0, 0), (2, 3), Span(first, 0, 24, 1)),
                    Chunk((2, 0), (3, 3), Span(second, 0, 36, 2)),
                ),
            ),
            "model.s": TensorEntry("bfloat16", (), (Chunk((), (), Span(first, 24, 2, 3)),)),
        },
        values={
            "extra": (Variant((0, 1), Span(first, 26, 2, 4)),),
            "rng": (Variant((1,), Span(second, 36, 4, 5)),),
        },
    )


def flip_bit(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def manifest_of(path: Path) -> Manifest:
    return Manifest.parse((path / NAME).read_bytes(), str(path / NAME))
