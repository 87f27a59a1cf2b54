"""Registered objects with sharded tensors, and what is refused in place of saving a part."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from vescale_fsdp import CheckpointMismatchError
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleFSDPPlugin

from .helpers import accelerator, full


class Average:
    """Of weights, in a dictionary."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, param in model.named_parameters():
            self.values[name].lerp_(param.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.values.items():
            value.copy_(state["values"][name])
        self.updates = state["updates"]


class Plain:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"best": torch.tensor(2.0), "names": ["a"]}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def prepared(acc: Any, seed: int) -> tuple[nn.Module, Average, AveragedModel, Plain]:
    torch.manual_seed(seed)
    model = acc.prepare(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False)))
    objects = Average(model), AveragedModel(model), Plain()
    acc.register_for_checkpointing(*objects)
    return (model, *objects)


def values(average: Average, model: AveragedModel) -> list[torch.Tensor]:
    return [full(value) for value in (*average.values.values(), *model.state_dict().values())]


def save(folder: Path, sealed: bool) -> list[torch.Tensor]:
    with accelerator(fsdp_plugin=VeScaleFSDPPlugin(sealed=sealed)) as acc:
        model, average, averaged, plain = prepared(acc, 0)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)
        average.update(model)
        averaged.update_parameters(model)
        plain.state["best"] = torch.tensor(1.0)
        acc.save_state(folder)
        return values(average, averaged)


def load(folder: Path) -> tuple[list[torch.Tensor], int, float]:
    with accelerator() as acc:
        _, average, averaged, plain = prepared(acc, 1)
        acc.load_state(folder)
        return values(average, averaged), average.updates, plain.state["best"].item()


@pytest.mark.parametrize("sealed", [False, True])
def test_averages_are_saved_whole_and_loaded_on_other_ranks(tmp_path: Path, sealed: bool) -> None:
    saved = run_ranks(save, 2, tmp_path, sealed)[0]
    for size in (2, 3, 1):
        for found, updates, best in run_ranks(load, size, tmp_path):
            torch.testing.assert_close(found, saved, rtol=0, atol=0)
            assert (updates, best) == (1, 1.0)


def load_one_part(folder: Path) -> None:
    with accelerator() as acc:
        _, average, *_ = prepared(acc, 0)
        acc.save_state(folder)
        if acc.is_main_process:  # as they were saved by the first process alone
            torch.save(average.state_dict(), folder / "custom_checkpoint_0.pkl")
        acc.wait_for_everyone()
        with pytest.raises(CheckpointMismatchError, match="one process's part"):
            acc.load_state(folder)


def test_one_process_s_part_is_not_taken_for_all(tmp_path: Path) -> None:
    run_ranks(load_one_part, 2, tmp_path)


def refused(file: Path) -> None:
    with accelerator() as acc:
        model, *_ = prepared(acc, 0)
        with pytest.raises(TypeError, match=r"accelerator\.get_state_dict"):
            acc.save(acc.unwrap_model(model).state_dict(), file)
        assert not file.exists()
        acc.save(acc.get_state_dict(model), file)
        acc.wait_for_everyone()
        assert torch.load(file, weights_only=True)["0.weight"].shape == (5, 3)
        stray = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
        with pytest.raises(ValueError, match="none of them is one of the models"):
            acc.prepare(nn.Linear(2, 2), stray)
        head = nn.Linear(2, 2)
        own, _ = acc.prepare(torch.optim.SGD(head.parameters(), 0.1), head)  # in this order too
        assert own.param_groups[0]["params"][0] is head.weight


def test_shards_in_a_file_and_optimizers_of_other_models_are_refused(tmp_path: Path) -> None:
    run_ranks(refused, 2, tmp_path / "weights.bin")


def pickled() -> None:
    with accelerator() as acc:
        loader = acc.prepare(torch.utils.data.DataLoader([1, 2, 3, 4]))
        assert pickle.loads(pickle.dumps(acc)).num_processes == acc.num_processes
        assert len(pickle.loads(pickle.dumps(loader))) == len(loader)


def test_an_accelerator_can_be_pickled() -> None:
    run_ranks(pickled, 2)
