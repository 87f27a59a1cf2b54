"""Fabric: the user owns the loop, and the strategy the sharding and the checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.fabric
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from vescale_fsdp import FSDPModule, RaggedTensor
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import VeScaleFabricStrategy

from .lit import Block, full_parameters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def make_fabric(strategy: Any, **options: Any) -> lightning.fabric.Fabric:
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(size))
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=size, strategy=strategy, **options)
    fabric.launch()
    return fabric


def set_up(strategy: Any) -> tuple[Any, Any, Any]:
    fabric = make_fabric(strategy)
    model = fabric.setup_module(make_net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return fabric, model, optimizer


def steps(fabric: Any, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Two micro-batches each, clipped by norm, then by value."""
    losses = []
    for step in range(first, last):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + fabric.global_rank)
            x = torch.randn(4, 12, generator=generator)
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
                fabric.backward(loss)
            is_ours = isinstance(next(model.parameters()), RaggedTensor)
            has_gradients = any(p.grad is not None for p in model.parameters())
            assert has_gradients == (micro == 1 or not is_ours)
            losses.append(loss.item())
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        fabric.clip_gradients(model, optimizer, clip_val=0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Counter:
    """A scheduler or the like."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def saved_and_loaded(root: Path, kind: str, expected: list[float]) -> None:
    fabric, model, optimizer = set_up(VeScaleFabricStrategy(state_dict_type=kind))
    assert steps(fabric, model, optimizer, 0, 2) == pytest.approx(expected[:4], rel=1e-6)
    counter = Counter()
    counter.count = 7
    state = {"model": model, "optimizer": optimizer, "counter": counter, "step": 2, "other": "x"}
    for _ in range(2):  # the second time over the first
        fabric.save(root / kind, state)

    fabric, model, optimizer = set_up(VeScaleFabricStrategy())
    found: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "counter": Counter(),
        "step": 0,
    }
    rest = fabric.load(root / kind, found)
    assert rest == {"other": "x"}
    assert found["step"] == 2
    assert found["counter"].count == 7
    assert steps(fabric, model, optimizer, 2, 4) == pytest.approx(expected[4:], rel=1e-6)
    with pytest.raises(KeyError, match="'absent' is not in the checkpoint"):
        fabric.load(root / kind, {"model": model, "absent": 1})


def two_models(root: Path) -> None:
    """Each a root of its own, in one checkpoint."""
    fabric = make_fabric("vescale_fsdp")
    models = [fabric.setup_module(make_net()) for _ in range(2)]
    optimizers = [
        fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9))
        for model, rate in zip(models, (0.1, 0.2), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(fabric, model, optimizer, 0, 1)
    state = {"a": models[0], "b": models[1], "of_a": optimizers[0], "of_b": optimizers[1]}
    fabric.save(root / "two", state)
    before = [full_parameters(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(fabric, model, optimizer, 1, 2)
    fabric.load(root / "two", state)
    for model, expected in zip(models, before, strict=True):
        for name, param in full_parameters(model).items():
            assert torch.equal(param, expected[name])
    assert not torch.equal(
        before[0]["_forward_module.head.bias"], before[1]["_forward_module.head.bias"]
    )


def mistakes(root: Path) -> None:
    fabric = make_fabric("vescale_fsdp")
    plain = make_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pytest.raises(NotImplementedError, match="setup_module"):
        fabric.setup(plain, optimizer)
    model = fabric.setup_module(plain)
    with pytest.raises(ValueError, match="made before the model was sharded"):
        fabric.setup_optimizers(optimizer)
    with pytest.raises(ValueError, match="there is no model"):
        fabric.save(root / "x", {"step": 1})
    with pytest.raises(NotImplementedError, match='state_dict_type="full"'):
        fabric.save(root / "x", {"model": model}, filter={"model": lambda name, _: "bias" in name})
    fabric = make_fabric(VeScaleFabricStrategy(state_dict_type="full"))
    fabric.save(root / "x", {"model": model}, filter={"model": lambda name, _: "bias" in name})
    if fabric.global_rank == 0:
        found = torch.load(root / "x")["model"]
        assert found
        assert all("bias" in name for name in found)
    with pytest.raises(ValueError, match="precision='64-true'"):
        make_fabric("vescale_fsdp", precision="64-true")
    with pytest.raises(ValueError, match="16-mixed"):
        make_fabric("vescale_fsdp", precision="16-mixed")


def empty_init() -> None:
    fabric = make_fabric("vescale_fsdp", precision="bf16-mixed")
    with fabric.init_module(empty_init=True):
        model = Net()
    assert model.head.weight.is_meta
    model = fabric.setup_module(model)
    loss = model(torch.ones(2, 12)).sum()
    fabric.backward(loss)
    assert loss.isfinite()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    units = [name for name, child in model.module.named_modules() if isinstance(child, FSDPModule)]
    assert units == ["", "blocks.0", "blocks.1"]


def fabric_scenarios(root: Path) -> None:
    fabric, model, optimizer = set_up("ddp")
    expected = steps(fabric, model, optimizer, 0, 4)
    for kind in ("sharded", "full", "dcp"):
        saved_and_loaded(root, kind, expected)
    two_models(root)
    mistakes(root)
    empty_init()


def test_fabric_trains_as_ddp_saves_loads_and_refuses(tmp_path: Path) -> None:
    run_ranks(fabric_scenarios, 2, tmp_path, timeout_s=100)
