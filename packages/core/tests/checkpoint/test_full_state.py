"""Full state dicts on the first rank, by torch's functions: others hold a few tensors at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import full
from vescale_fsdp.optim import AdamW8bit
from vescale_fsdp.testing import run_ranks

from ..allocations import peak_of, traced

SIZE = 128 * 128 * 4  # bytes of a matrix


def measure() -> list[tuple[int, float]]:
    """For model and optimizer: how many entries this rank gets, and the peak in matrices."""
    model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(8)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gets: list[Callable[[], dict[str, Any]]] = [
        lambda: get_model_state_dict(model, options=options),
        lambda: get_optimizer_state_dict(model, optimizer, options=options),
    ]
    found = []
    for get in gets:
        kept: list[dict[str, Any]] = []
        peak, _ = peak_of(traced(lambda get=get, kept=kept: kept.append(get())))
        found.append((len(kept[0].get("state", kept[0])), peak / SIZE))
    return found


def test_the_first_rank_gets_all_and_others_hold_a_few_tensors_at_a_time() -> None:
    """Of 8 matrices, and 16 moments of AdamW. A gather makes one, and a copy of it.

    Gloo's threads let go of theirs a little later.
    """
    first, other = run_ranks(measure, 2)
    assert [count for count, _ in first] == [8, 8]
    assert first[0][1] > 8  # the premise: it is seen
    assert first[1][1] > 16
    assert [count for count, _ in other] == [0, 0]
    assert other[0][1] < 6
    assert other[1][1] < 8


def make_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
        "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        "loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "8bit": lambda p: AdamW8bit(p, lr=0.1),
    }
    return makers[name](params)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def load_whole_states(name: str) -> None:
    """One step in one process, then its states, and another step on shards."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    reference = make_optimizer(name, plain.parameters())
    train(plain, reference)
    saved = copy.deepcopy(reference.state_dict())
    models = [copy.deepcopy(plain) for _ in range(3)]
    train(plain, reference)
    for way, model in zip(("hook", "function", "refused"), models, strict=True):
        fully_shard(model)
        states = copy.deepcopy(saved)  # a load copies nothing, and a step writes to its counters
        optimizer = make_optimizer(name, model.parameters())
        if way == "hook":
            full.take_whole_states(optimizer)
        if way == "function":
            full.load_optimizer(model, optimizer, states)
        else:
            optimizer.load_state_dict(states)
        if way == "refused" and name != "8bit":  # ours takes its part
            with pytest.raises(ValueError, match=r"has loaded whole states.*full\.load_optimizer"):
                train(model, optimizer)
            continue
        train(model, optimizer)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(mine, DTensor)
            torch.testing.assert_close(mine.full_tensor(), theirs, msg=f"{name}, {way}")


def load_whole_states_of_all() -> None:
    for name in ("adamw", "fused", "loop", "sgd", "8bit"):
        load_whole_states(name)


def test_whole_states_are_taken_or_the_step_names_the_function_that_takes_them() -> None:
    run_ranks(load_whole_states_of_all, 2)
