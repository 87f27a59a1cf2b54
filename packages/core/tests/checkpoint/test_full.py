"""Whole states in one process, and back into sharded models and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import CheckpointIncompleteError, CheckpointMismatchError, checkpoint
from vescale_fsdp.checkpoint import full
from vescale_fsdp.optim import SOAP, AdamW8bit, Muon, OptimizerGroup, Shampoo, flatten_
from vescale_fsdp.testing import run_ranks

from .helpers import Net, assert_same, everything, make, train

Maker = Callable[[nn.Module], torch.optim.Optimizer]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.layers.parameters() if param.dim() == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    own = {id(param) for param in matrices(model)}
    return [param for param in model.parameters() if id(param) not in own]


MAKERS: dict[str, Maker] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05),
    "flat": lambda m: flatten_(torch.optim.AdamW(m.parameters(), lr=0.05)),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "codes": lambda m: AdamW8bit(m.parameters(), lr=0.05, block_size=8, min_8bit_size=8),
    "shampoo": lambda m: Shampoo(matrices(m), lr=0.05, mode="owner"),
    "soap": lambda m: SOAP(matrices(m), lr=0.05),
    "group": lambda m: OptimizerGroup(
        {
            "matrices": Muon(matrices(m), lr=0.05),
            "others": torch.optim.AdamW(others(m), lr=0.05),
        }
    ),
}


def sharded(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    granularity = AdamW8bit.granularity(8, min_8bit_size=8) if name == "codes" else None
    model, _ = make(granularity, seed=seed)
    return model, MAKERS[name](model)


def save(folder: Path) -> None:
    for name in MAKERS:
        model, optimizer = sharded(name, 0)
        train(model, optimizer, range(2))
        trees = (full.model_state(model), full.optimizer_state(model, optimizer))
        is_first = dist.get_rank() == 0
        found = full.gathered(trees, keep=is_first)
        if is_first:
            torch.save(found, folder / f"{name}.pt")
        else:
            assert found[0].keys() == trees[0].keys(), "names without tensors"
            assert not any(isinstance(value, torch.Tensor) for value in found[0].values())
        then = everything(model, optimizer)
        train(model, optimizer, range(2, 4))
        after = everything(model, optimizer)
        if is_first:
            torch.save((then, after), folder / f"{name}-after.pt")


def load(folder: Path) -> None:
    for name in MAKERS:
        state, states = torch.load(folder / f"{name}.pt")
        then, after = torch.load(folder / f"{name}-after.pt")
        for form in (states, full.by_number(states)):
            model, optimizer = sharded(name, 1)
            full.load_model(model, state)
            full.load_optimizer(model, optimizer, form)
            assert_same(everything(model, optimizer), then)
            if dist.get_world_size() != 3:  # a third of three gradients is not exactly one
                train(model, optimizer, range(2, 4))
                assert_same(everything(model, optimizer), after)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_whole_states_go_on_bitwise_on_another_number_of_ranks(
    tmp_path: Path, num_ranks: int
) -> None:
    run_ranks(save, 2, tmp_path)
    run_ranks(load, num_ranks, tmp_path)


def test_one_process_without_sharding_goes_on_from_them(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path)
    for name in ("adamw", "momentum"):
        state, states = torch.load(tmp_path / f"{name}.pt")
        model = Net()
        model.load_state_dict(state)
        optimizer = MAKERS[name](model)
        optimizer.load_state_dict(full.by_number(states))
        train(model, optimizer, range(2, 4))
        _, after = torch.load(tmp_path / f"{name}-after.pt")
        for key, value in model.state_dict().items():
            assert torch.equal(value, after[key]), key


def save_sealed(folder: Path) -> None:
    for name in ("adamw", "codes"):
        model, optimizer = sharded(name, 0)
        train(model, optimizer, range(2))
        extra = {"step": 2, "seen": torch.arange(3)}
        checkpoint.save(folder / f"step-{name}", model, optimizer, extra=extra)
        tree = {"model": full.model_state(model), "state": full.optimizer_state(model, optimizer)}
        whole = full.gathered(tree, keep=dist.get_rank() == 0)
        if dist.get_rank() == 0:
            torch.save(whole, folder / f"{name}.pt")


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def test_one_process_reads_all_of_a_sealed_checkpoint(tmp_path: Path) -> None:
    run_ranks(save_sealed, 3, tmp_path)
    for name in ("adamw", "codes"):
        expected = torch.load(tmp_path / f"{name}.pt")
        found = checkpoint.read(tmp_path / f"step-{name}")
        assert found.keys() == {"model", "optimizer.0", "extra"}
        assert_equal(found["model"], expected["model"])
        assert_equal(found["optimizer.0"], expected["state"])
        assert_equal(found["extra"], {"step": 2, "seen": torch.arange(3)})
    with pytest.raises(CheckpointIncompleteError, match="there is no checkpoint at"):
        checkpoint.read(tmp_path)


def refuse() -> None:
    model, optimizer = make()
    train(model, optimizer, range(2))
    saved = full.gathered(full.optimizer_state(model, optimizer), keep=True)
    before = everything(model, optimizer)

    def refused(changed: dict[str, Any], match: str) -> None:
        with pytest.raises(CheckpointMismatchError, match=match):
            full.load_optimizer(model, optimizer, changed)
        assert_same(everything(model, optimizer), before)

    states = {**saved["state"], "scale": {**saved["state"]["scale"], "exp_avg": torch.ones(3)}}
    refused({**saved, "state": states}, r"'scale\.exp_avg' has the shape \(3,\) in the")
    lacking = [{**saved["param_groups"][0], "params": saved["param_groups"][0]["params"][1:]}]
    refused({**saved, "param_groups": lacking}, "this AdamW does not have scale; make")
    numbers = full.by_number({**saved, "param_groups": lacking})
    refused(numbers, "an optimizer with 6 parameters, and AdamW has 7")
    first, *rest = saved["param_groups"][0]["params"]
    group = saved["param_groups"][0]
    apart = [{**group, "params": [first]}, {**group, "params": rest, "lr": 9.0}]
    doubled = {n: {k: 2 * v for k, v in each.items()} for n, each in saved["state"].items()}
    refused({"state": doubled, "param_groups": apart}, "parameters of several saved groups")
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(CheckpointMismatchError, match="that the model does not have"):
        full.optimizer_state(model, stranger)


def test_what_does_not_fit_is_refused_and_nothing_has_changed() -> None:
    run_ranks(refuse, 2)


def shared() -> None:
    """One optimizer of two models; tied tensors are gathered once."""
    models = [make(seed=0)[0], make(seed=1)[0]]
    both = [param for model in models for param in model.parameters()]
    optimizer = torch.optim.SGD(both, lr=0.05, momentum=0.9)
    for model in models:
        train(model, torch.optim.SGD(model.parameters(), lr=0.0), range(1))
        model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    saved = full.gathered(full.optimizer_state(models, optimizer), keep=True)
    assert {name.partition(".")[0] for name in saved["state"]} == {"0", "1"}
    again = torch.optim.SGD(both, lr=0.1, momentum=0.9)
    full.load_optimizer(models, again, saved)
    loaded = full.gathered(full.optimizer_state(models, again), keep=True)
    assert torch.equal(
        loaded["state"]["1.layers.0.weight"]["momentum_buffer"],
        saved["state"]["1.layers.0.weight"]["momentum_buffer"],
    )
    own = torch.optim.SGD(models[1].parameters(), lr=0.1)
    assert "layers.0.weight" in full.optimizer_state(models, own)["param_groups"][0]["params"]


def test_names_of_several_models() -> None:
    run_ranks(shared, 2)
