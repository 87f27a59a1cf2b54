"""Directories of torch.distributed.checkpoint: the forms in which others save optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from vescale_fsdp import CheckpointMismatchError, CheckpointValueError, checkpoint, fully_shard
from vescale_fsdp.testing import run_ranks

from ..helpers import State, assert_same, everything, make, train


def made(seed: int = 0, *, named: bool = False) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model, and an optimizer whose groups have another order than the model's parameters."""
    model, _ = make(seed=seed)
    groups: list[dict[str, Any]] = [
        {"params": [n for n, p in model.named_parameters() if p.dim() == 2], "lr": 0.03 + seed},
        {"params": [n for n, p in model.named_parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    for group in groups:
        found = [(n, model.get_parameter(n)) for n in group["params"]]
        group["params"] = found if named else [param for _, param in found]
    return model, torch.optim.AdamW(groups, lr=0.05)


# By number: optimizer.state_dict()


def save_by_number(root: Path) -> State:
    for name, named in (("numbers", False), ("names", True)):
        model, optimizer = made(named=named)
        train(model, optimizer, range(2))
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=root / name)
    return everything(model, optimizer)


def load_by_number(root: Path) -> list[State]:
    found = []
    for name in ("numbers", "names", "converted"):
        model, optimizer = made(seed=1)
        loader = checkpoint.load if name == "converted" else checkpoint.import_dcp
        loader(root / name, model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.03
        found.append(everything(model, optimizer))
    model, optimizer = made(seed=1)
    checkpoint.import_dcp(root / "numbers", model, optimizer, weights="none")
    found.append(
        {**found[0], **{n: v for n, v in everything(model, optimizer).items() if "/" in n}}
    )
    alone = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointMismatchError, match=r"groups of \[3, 4\] parameters, and 0 has"):
        checkpoint.import_dcp(root / "numbers", model, alone)
    with pytest.raises(CheckpointMismatchError, match="has the states of one optimizer, by number"):
        checkpoint.import_dcp(root / "numbers", model, {"a": optimizer, "b": alone})
    return found


def test_states_by_number_are_those_of_the_optimizer_that_is_given(tmp_path: Path) -> None:
    expected = run_ranks(save_by_number, 2, tmp_path)[0]
    with pytest.raises(CheckpointValueError, match=r"optimizer\.0 are by number.*import_dcp"):
        checkpoint.convert(tmp_path / "numbers", tmp_path / "new", to="vescale")
    assert not (tmp_path / "new").exists()
    checkpoint.convert(tmp_path / "numbers", tmp_path / "weights", to="safetensors")
    checkpoint.convert(tmp_path / "names", tmp_path / "converted", to="vescale")
    for found in run_ranks(load_by_number, 2, tmp_path)[0]:
        assert_same(found, expected)


# Flattened, at the top level


class Block(nn.Module):
    """Its names look like those of an optimizer's states."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.state(x) * self.weight


def block(seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = fully_shard(Block())
    return model, torch.optim.AdamW(model.parameters(), lr=0.05 + seed)


def save_flattened(path: Path) -> State:
    model, optimizer = block()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({**model.state_dict(), **states, "step": 1}, checkpoint_id=path)
    dcp.save({"model": model.state_dict(), **states, "step": 1}, checkpoint_id=path / "nested")
    return everything(model, optimizer)


def load_flattened(path: Path) -> list[State]:
    found = []
    for folder in (path, path / "nested", path / "sealed"):
        model, optimizer = block(1)
        loader = checkpoint.load if folder.name == "sealed" else checkpoint.import_dcp
        assert loader(folder, model, optimizer) == {"step": 1}
        assert optimizer.param_groups[0]["lr"] == 0.05
        found.append(everything(model, optimizer))
    return found


def test_flattened_states_beside_the_model_are_the_optimizers(tmp_path: Path) -> None:
    path = tmp_path / "flat"
    expected = run_ranks(save_flattened, 2, path)[0]
    checkpoint.convert(path, path / "sealed", to="vescale")
    checkpoint.convert(path, path / "weights", to="safetensors")
    found = load_file(path / "weights/model.safetensors")
    assert found.keys() == Block().state_dict().keys()
    for found in run_ranks(load_flattened, 2, path)[0]:
        assert_same(found, expected)
