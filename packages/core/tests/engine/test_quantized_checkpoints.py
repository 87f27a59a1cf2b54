"""Training in 8 bits that goes on from a checkpoint: on as many ranks, and on others."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import (
    CheckpointMismatchError,
    Granularity,
    QuantizedGather,
    QuantizedReduce,
    combine,
)
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.engine.quantized import ErrorFeedback
from vescale_fsdp.optim import AdamW8bit, Muon, OptimizerGroup, split_named_params
from vescale_fsdp.testing import run_ranks

from .helpers import Tensors, assert_bit_equal, full, full_parameters, shard_units
from .models import MLP, TinyGPT, gpt_loss, inputs_of, make, tokens_of
from .test_quantized_composition import LowRank

# Of one kind of training: the optimizer, and how weights and gradients travel.
KINDS: dict[str, dict[str, Any]] = {
    "AdamW8bit": {
        "gather_codec": QuantizedGather("int8", (4, 4)),
        "reduce_codec": QuantizedReduce(16),
    },
    "Muon": {
        "gather_codec": QuantizedGather("e4m3", (4, 5)),
        "reduce_codec": QuantizedReduce((4, 5), error_feedback=True),
    },
}


def optimizer_of(model: nn.Module, kind: str) -> Any:
    if kind == "AdamW8bit":
        return AdamW8bit(model.parameters(), lr=0.01, block_size=16, min_8bit_size=64)
    hidden, rest = split_named_params(model)
    return OptimizerGroup(muon=Muon(hidden, lr=0.02), adamw=torch.optim.AdamW(rest, lr=0.01))


def sharded(kind: str, seed: int) -> tuple[nn.Module, Any]:
    """Cut at random, by whole blocks of all that has some."""
    chance = random.Random(f"{kind} {seed} {dist.get_world_size()}")
    rows = Granularity.rows(chance.randint(1, 4))
    asked = AdamW8bit.granularity(16, min_8bit_size=64) if kind == "AdamW8bit" else None
    options = KINDS[kind]
    cuts = [options["gather_codec"].granularity(), options["reduce_codec"].granularity(), rows]
    model = make(TinyGPT, seed=seed)
    shard_units(model, model.blocks, granularity=combine(asked, *cuts), **options)
    return model, optimizer_of(model, kind)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = gpt_loss(model, tokens_of(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(model: nn.Module, optimizer: Any) -> Tensors:
    """Parameters and states, whole."""
    found = full_parameters(model)
    for member in getattr(optimizer, "optimizers", {"": optimizer}).values():
        names = {id(param): name for name, param in model.named_parameters()}
        for param, states in member.state.items():
            for key, value in states.items():
                if isinstance(value, torch.Tensor):
                    found[f"{names[id(param)]} {key}"] = full(value)
    return found


def check_save(folder: str) -> dict[str, Tensors]:
    """Saves after three steps, and has what three more give to a run that loads."""
    found = {}
    for kind in KINDS:
        model, optimizer = sharded(kind, 0)
        train(model, optimizer, range(3))
        save(f"{folder}/{kind}", model, optimizer).wait()
        found[kind] = everything(model, optimizer)
        feedback = {name: each.clone() for name, each in ErrorFeedback(model).tensors().items()}
        losses = train(model, optimizer, range(3, 6))
        again, other = sharded(kind, 1)
        train(again, other, range(1))  # has states, and errors, of its own
        load(f"{folder}/{kind}", again, other)
        assert_bit_equal(dict(ErrorFeedback(again).tensors()), dict(feedback))
        assert bool(feedback) == KINDS[kind]["reduce_codec"].error_feedback
        assert train(again, other, range(3, 6)) == losses
        assert_bit_equal(everything(again, other), everything(model, optimizer))
    plain = make(LowRank)
    shard_units(plain, plain.layers, gather_codec=QuantizedGather(block=(1, 4)))
    adapters = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    for step in range(2):
        plain(inputs_of(step, dist.get_rank(), 8)).square().mean().backward()
        adapters.step()
        adapters.zero_grad()
    save(f"{folder}/packed", plain, adapters).wait()
    found["packed"] = everything(plain, adapters)
    return found


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def check_load(folder: str) -> dict[str, Tensors]:
    """On another number of ranks: the same states, cut otherwise; error feedback starts anew."""
    messages = Messages()
    logging.getLogger("vescale_fsdp.checkpoint.targets").addHandler(messages)
    found = {}
    for kind in KINDS:
        model, optimizer = sharded(kind, 2)
        train(model, optimizer, range(1))
        load(f"{folder}/{kind}", model, optimizer)
        found[kind] = everything(model, optimizer)
        assert not ErrorFeedback(model).tensors()
        train(model, optimizer, range(3, 4))
    expected = ["error feedback of gradients starts from zero: 2 ranks saved it, and"]
    told = [text for text in messages.texts if expected[0] in text]
    assert len(told) == (dist.get_rank() == 0), messages.texts
    other = make(LowRank, seed=1)
    shard_units(other, other.layers)
    adapters = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad])
    load(f"{folder}/packed", other, adapters)
    found["packed"] = everything(other, adapters)
    return found


def test_resumed_runs_have_the_bits_of_those_that_go_on(tmp_path: Path) -> None:
    saved = run_ranks(check_save, 2, str(tmp_path))[0]
    for world_size in (1, 3):  # fewer, and more
        for loaded in run_ranks(check_load, world_size, str(tmp_path)):
            for kind, tensors in saved.items():
                assert_bit_equal(loaded[kind], tensors)


def check_failed_load(folder: str) -> None:
    """What a load has changed before it fails is put back: error feedback too."""
    model = make(MLP, 1, 8)
    shard_units(model, model.layers, reduce_codec=QuantizedReduce(16, error_feedback=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(inputs_of(step, dist.get_rank(), 8)).square().sum().backward()
        if step == 0:
            save(f"{folder}/one", model, optimizer).wait()
    before = {name: each.clone() for name, each in ErrorFeedback(model).tensors().items()}
    assert any(each.any() for each in before.values())

    def fail(_: object) -> None:
        raise CheckpointMismatchError("no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vescale_fsdp.checkpoint.targets.RngTarget.apply", fail)
        with pytest.raises(CheckpointMismatchError, match="no"):
            load(f"{folder}/one", model, optimizer)
    assert_bit_equal(dict(ErrorFeedback(model).tensors()), dict(before))
    load(f"{folder}/one", model)  # weights alone: the rest of the run goes on
    assert_bit_equal(dict(ErrorFeedback(model).tensors()), dict(before))
    load(f"{folder}/one", model, optimizer)
    changed = ErrorFeedback(model).tensors()
    assert any(not torch.equal(changed[name], each) for name, each in before.items())


def test_a_load_that_fails_leaves_error_feedback_as_it_was(tmp_path: Path) -> None:
    run_ranks(check_failed_load, 2, str(tmp_path))
