"""What other code does with the states of a model and an optimizer, before and after a load."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_fsdp import CheckpointExistsError, checkpoint, fully_shard
from vescale_fsdp.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from vescale_fsdp.testing import run_ranks

ROWS = ["zero3", "zero1", "ddp"]


class LM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(8, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))  # type: ignore[no-any-return]


def make(seed: int = 0, **options: Any) -> LM:
    torch.manual_seed(seed)
    return fully_shard(LM(), **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(state: Any) -> dict[str, Tensor]:
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).clone()
        for name, each in state.items()
    }


def kept_states(row: str) -> None:
    """A state dict that is kept in any of the usual ways has the values of its time."""
    model = make(sharding=row)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(2):
        expected = whole(model.state_dict())
        kept: dict[str, Any] = {
            "deepcopy": copy.deepcopy(model.state_dict()),
            "full tensors": {k: v.full_tensor() for k, v in model.state_dict().items()},
            "gathered": checkpoint.full.gathered(checkpoint.full.model_state(model), keep=True),
            "copies of parameters": dict(copy.deepcopy(model).named_parameters()),
        }
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        kept["torch.save"] = torch.load(file, weights_only=False)
        assert len(file.getvalue()) < 20_000  # not the whole buffer with each
        step(model, optimizer)
        for name, state in kept.items():
            for fqn, value in whole(state).items():
                assert torch.equal(value, expected[fqn]), f"{name}: {fqn}"
    model.load_state_dict(kept["deepcopy"])
    for fqn, value in whole(model.state_dict()).items():
        assert torch.equal(value, expected[fqn])


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_state_that_is_kept_does_not_change(row: str, num_ranks: int) -> None:
    run_ranks(kept_states, num_ranks, row)


def halves(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in state:
        state[name] = state[name].to(torch.bfloat16)


def hooked_states(root: Path) -> None:
    """Each of two tied names gets a copy by a hook."""
    saved, loaded = make(0), make(1)
    for model in (saved, loaded):
        model.register_state_dict_post_hook(halves)
    checkpoint.save(root / "own", saved)
    checkpoint.save_safetensors(root / "safetensors", saved)
    checkpoint.export_dcp(root / "dcp", saved)
    expected = whole(saved.state_dict())
    for load, name in (
        (checkpoint.load, "own"),
        (checkpoint.load_safetensors, "safetensors"),
        (checkpoint.import_dcp, "dcp"),
    ):
        with torch.no_grad():
            for param in loaded.parameters():
                param.zero_()
        load(root / name, loaded)
        for fqn, value in whole(loaded.state_dict()).items():
            assert torch.equal(value, expected[fqn]), f"{name}: {fqn}"


def test_tied_names_of_which_a_hook_makes_copies_are_all_loaded(tmp_path: Path) -> None:
    run_ranks(hooked_states, 2, tmp_path)


def hooks_of_steps(root: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    step(model, optimizer)
    checkpoint.save(root / "saved", model, optimizer)

    names = {id(param): name for name, param in model.named_parameters()}
    fresh, calls = torch.optim.AdamW(model.parameters(), 0.1), []

    def log(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        calls.extend(names[id(p)] for group in optimizer.param_groups for p in group["params"])

    fresh.register_step_pre_hook(log)
    fresh.register_step_post_hook(log)
    handle = register_optimizer_step_pre_hook(log)
    try:
        checkpoint.load(root / "saved", model, fresh)
        assert calls == []
        step(model, fresh)
        assert len(calls) == 3 * len(names)
    finally:
        handle.remove()


def test_a_load_runs_no_hooks_of_steps(tmp_path: Path) -> None:
    run_ranks(hooks_of_steps, 2, tmp_path)


class Outer(torch.optim.Optimizer):
    """An optimizer by type only, as Accelerate makes of each: it has no hooks of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


def wrapped(root: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    step(model, optimizer)
    checkpoint.save(root / "saved", model, optimizer)
    fresh = torch.optim.AdamW(model.parameters(), 0.1)
    checkpoint.load(root / "saved", model, Outer(fresh))
    for param in model.parameters():
        found, expected = (whole(each.state[param]) for each in (fresh, optimizer))
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_load_into_an_optimizer_that_wraps_another(tmp_path: Path) -> None:
    run_ranks(wrapped, 2, tmp_path)


def saves_and_leaves(root: Path) -> None:
    before = os.getcwd()
    os.chdir(root)
    try:
        model = make()
        save = checkpoint.save("in-background", model, async_=True)
        os.chdir("/")
        save.wait()
        os.chdir(root)
        dist.barrier()
        checkpoint.load("in-background", model)
        with pytest.raises(CheckpointExistsError):
            checkpoint.save(".", model)
    finally:
        os.chdir(before)


def test_a_relative_path_is_of_the_time_of_the_call(tmp_path: Path) -> None:
    run_ranks(saves_and_leaves, 2, tmp_path)


def torch_states(row: str) -> None:
    """Torch's functions, from and into a model of this row."""
    model, other = make(0, sharding=row), make(1, sharding=row)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in (model, other)]
    step(model, optimizers[0])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = copy.deepcopy(get_state_dict(model, optimizers[0], options=options))
    both = [states]  # on the first rank
    dist.broadcast_object_list(both)
    model_state, optimizer_state = both[0]
    set_state_dict(
        other,
        optimizers[1],
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=StateDictOptions(full_state_dict=True),
    )
    for each, optimizer in zip((model, other), optimizers, strict=True):
        step(each, optimizer)
    expected = whole(model.state_dict())
    for fqn, value in whole(other.state_dict()).items():
        assert torch.equal(value, expected[fqn]), fqn


@pytest.mark.parametrize("row", ROWS)
def test_full_states_of_torch_continue_a_training(row: str) -> None:
    run_ranks(torch_states, 2, row)
