"""``weights=``: optimizers alone, and what is trained alone, in the sealed format and in DCP's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vescale_fsdp import CheckpointIncompleteError, checkpoint, fully_shard
from vescale_fsdp.checkpoint import full
from vescale_fsdp.ranks import Ranks
from vescale_fsdp.testing import run_ranks

from .helpers import make, train


def both(folder: Path) -> list[tuple[Any, Any, Path]]:
    """Pairs of a function that saves and one that loads."""
    return [
        (checkpoint.save, checkpoint.load, folder / "sealed"),
        (checkpoint.export_dcp, checkpoint.import_dcp, folder / "dcp"),
    ]


def load_optimizers_alone(folder: Path) -> list[tuple[bool, bool]]:
    found = []
    for save, load, path in both(folder):
        model, optimizer = make()
        train(model, optimizer, range(2))
        save(path, model, optimizer, weights="none")
        other, new = make(seed=1)
        before = full.gathered(full.model_state(other), keep=True)
        load(path, other, new, weights="none")
        after = full.gathered(full.model_state(other), keep=True)
        own, loaded = (
            full.gathered(full.optimizer_state(each, of), keep=True)["state"]["scale"]
            for each, of in ((model, optimizer), (other, new))
        )
        found.append(
            (
                all(torch.equal(before[name], after[name]) for name in before),
                all(torch.equal(own[key], loaded[key]) for key in own),
            )
        )
    return found


def test_an_optimizer_alone_is_loaded_and_the_model_left_alone(tmp_path: Path) -> None:
    assert run_ranks(load_optimizers_alone, 2, tmp_path)[0] == [(True, True)] * 2


class Tied(nn.Module):
    """A frozen weight with two names, and an adapter."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.adapter = nn.Linear(4, 4)
        nn.init.constant_(self.embed.weight, value)
        nn.init.constant_(self.adapter.weight, value)


def load_what_is_trained(folder: Path) -> list[tuple[Any, float, float, str]]:
    found = []
    for save, load, path in both(folder):
        saved, other = Tied(1.0), Tied(2.0)
        for model in (saved, other):
            fully_shard(model)
        save(path, saved, weights="trained")
        load(path, other, weights="trained")
        adapter, head = other.adapter.weight.full_tensor(), other.head.weight.full_tensor()  # type: ignore[operator]
        with pytest.raises(CheckpointIncompleteError) as error:
            load(path, other)
        names = sorted(full.model_state(saved, trained_only=True))
        found.append((names, adapter.mean().item(), head.mean().item(), str(error.value)))
    return found


def test_what_is_frozen_is_left_out_under_all_of_its_names(tmp_path: Path) -> None:
    for names, adapter, head, message in run_ranks(load_what_is_trained, 2, tmp_path)[0]:
        assert names == ["adapter.bias", "adapter.weight"]
        assert (adapter, head) == (1.0, 2.0)
        assert "lacks 2 entries: model.embed.weight, model.head.weight" in message


def test_a_rank_says_that_it_goes_on_while_it_checks_what_it_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "all", model, optimizer)
    said: list[Ranks] = []
    monkeypatch.setattr(Ranks, "still", lambda ranks: said.append(ranks))
    checkpoint.load(tmp_path / "all", model)
    assert len(said) >= 2 + 4  # the parameters, and two states of each
