"""Optimizers of torch go on from a checkpoint as if they had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import CheckpointIncompleteError, CheckpointMismatchError, checkpoint
from vescale_fsdp.optim import flatten_
from vescale_fsdp.testing import run_ranks

from .helpers import assert_same, everything, fingerprint, make, train

Maker = Callable[[nn.Module], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "flat": lambda m: flatten_(torch.optim.AdamW(m.parameters(), lr=0.05)),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "stateless": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "at once": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),  # states from the start
    "tensor lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.05), amsgrad=True),
    "groups": lambda m: torch.optim.AdamW(
        [
            {"params": m.layers.parameters(), "lr": 0.1},
            {"params": [m.scale, *m.unused.parameters()], "betas": (0.8, 0.9)},
        ]
    ),
}


def make_with(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make(seed=seed)
    return model, MAKERS[name](model)


def go_on(root: Path) -> None:
    for name in MAKERS:
        model, optimizer = make_with(name, 0)
        checkpoint.save(root / f"{name}-0", model, optimizer)
        num_states = len(optimizer.state)
        train(model, optimizer, range(2))
        checkpoint.save(root / f"{name}-2", model, optimizer)
        after_two = everything(model, optimizer)
        train(model, optimizer, range(2, 4))
        after_four = everything(model, optimizer)

        model, optimizer = make_with(name, 1)  # has no states yet
        checkpoint.load(root / f"{name}-2", model, optimizer)
        assert_same(everything(model, optimizer), after_two)
        train(model, optimizer, range(2, 4))
        assert_same(everything(model, optimizer), after_four)
        # Back to the beginning: the states that are there now were not there then.
        checkpoint.load(root / f"{name}-0", model, optimizer)
        assert len(optimizer.state) == num_states
        train(model, optimizer, range(4))
        assert_same(everything(model, optimizer), after_four)

        model, optimizer = make_with(name, 1)  # has states of some parameters, and gradients
        model(torch.ones(2, 5)).sum().backward()
        model.layers[2].weight.grad = None
        optimizer.step()
        gradient = model.scale.grad.full_tensor().clone()
        checkpoint.load(root / f"{name}-2", model, optimizer)
        assert_same(everything(model, optimizer), after_two)
        assert torch.equal(model.scale.grad.full_tensor(), gradient)
        optimizer.zero_grad()
        train(model, optimizer, range(2, 4))
        assert_same(everything(model, optimizer), after_four)


def test_optimizers_go_on_bitwise_from_any_state(tmp_path: Path) -> None:
    run_ranks(go_on, 2, tmp_path)


def save_and_load_stages(root: Path) -> None:
    """Pipeline stages: other parameters on each rank, one checkpoint."""
    rank = dist.get_rank()

    def stage(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({str(rank): nn.Linear(2 + rank, 3)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + rank))

    model, optimizer = stage(seed=rank)
    model[str(rank)](torch.ones(2 + rank)).sum().backward()
    optimizer.step()
    expected = fingerprint(model, optimizer)
    checkpoint.save(root / "step", model, optimizer)
    other, other_optimizer = stage(seed=7)
    other_optimizer.param_groups[0]["lr"] = 0.0
    checkpoint.load(root / "step", other, other_optimizer)
    assert fingerprint(other, other_optimizer) == expected


def test_stages_of_a_pipeline_share_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(save_and_load_stages, 2, tmp_path)
    manifest = checkpoint.verify(tmp_path / "step")
    assert {"model.0.weight", "model.1.weight"} <= manifest.tensors.keys()
    assert len(manifest.values["optimizer.0"]) == 2  # options of each stage


def load_in_part(root: Path) -> None:
    model, optimizer = make(seed=0)
    train(model, optimizer, range(2))
    checkpoint.save(root / "model", model)
    checkpoint.save(root / "layers", model.layers, torch.optim.SGD(model.layers.parameters()))
    other, other_optimizer = make(seed=1)
    train(other, other_optimizer, range(1))
    before = fingerprint(other, other_optimizer)
    deeper = nn.ModuleDict({"model": other})
    with pytest.raises(CheckpointIncompleteError, match=r"lacks 8 entries: model\.model\."):
        checkpoint.load(root / "model", deeper)
    checkpoint.load(root / "model", deeper, strict=False)
    assert fingerprint(other, other_optimizer) == before
    # Parameters come, states stay: the optimizer was not saved.
    states = {k: v for k, v in everything(other, other_optimizer).items() if "/" in k}
    checkpoint.load(root / "model", other, other_optimizer, strict=False)
    found: dict[str, Any] = everything(other, other_optimizer)
    assert_same({k: v for k, v in found.items() if "/" in k}, states)
    assert torch.equal(found["scale"], everything(model, optimizer)["scale"])


def test_without_strict_what_is_there_is_loaded_and_the_rest_stays(tmp_path: Path) -> None:
    run_ranks(load_in_part, 2, tmp_path)


def load_into_fewer_groups(root: Path) -> None:
    model, _ = make(seed=0)
    layers, rest = list(model.layers.parameters()), [model.scale]
    optimizer = torch.optim.AdamW([{"params": layers}, {"params": rest, "lr": 0.5}], lr=0.1)
    train(model, optimizer, range(2))
    checkpoint.save(root / "two", model, optimizer)
    checkpoint.export_dcp(root / "dcp", model, optimizer)
    other, _ = make(seed=1)
    less = torch.optim.AdamW(other.layers.parameters(), lr=0.1)
    before = fingerprint(other, less)
    expected = r"states of 1 parameters of the model that are in no optimizer here \(scale"
    with pytest.raises(CheckpointMismatchError, match=expected):
        checkpoint.load(root / "two", other, less)
    with pytest.raises(CheckpointMismatchError, match=expected):
        checkpoint.import_dcp(root / "dcp", other, less)
    assert fingerprint(other, less) == before
    checkpoint.load(root / "two", other, less, strict=False)
    assert len(less.state) == len(layers)


def test_states_of_parameters_that_no_optimizer_has_are_not_dropped_in_silence(
    tmp_path: Path,
) -> None:
    run_ranks(load_into_fewer_groups, 2, tmp_path)


def test_an_optimizer_that_makes_states_from_losses_only_is_said(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(1, 2)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    checkpoint.save(tmp_path / "a", model, optimizer)
    fresh = torch.optim.LBFGS(model.parameters())
    with pytest.raises(CheckpointMismatchError, match="take a step with it before the load"):
        checkpoint.load(tmp_path / "a", model, fresh)
    checkpoint.load(tmp_path / "a", model, optimizer)


def test_a_tensor_of_the_options_comes_back_on_its_device(tmp_path: Path) -> None:
    """As CUDA's graphs want a learning rate; the meta device stands for CUDA."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25))
    checkpoint.save(tmp_path / "a", model, optimizer)
    checkpoint.load(tmp_path / "a", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.25)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    checkpoint.load(tmp_path / "a", model, optimizer)
    assert optimizer.param_groups[0]["lr"].device.type == "meta"
