"""Trials of a model for a budget: on copies, without a change to the model or to generators."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import devices, repeated_blocks
from vescale_fsdp.errors import PlanError
from vescale_fsdp_tune.budget import Budget
from vescale_fsdp_tune.budget.blocks import kind_of
from vescale_fsdp_tune.budget.trace import loss_of
from vescale_fsdp_tune.budget.trials import Subject, divide
from vescale_fsdp_tune.budget.twins import meta_twin
from vescale_fsdp_tune.budget.units import divisions_to_try
from vescale_fsdp_tune.costs.model import Event
from vescale_fsdp_tune.costs.problem import Division

from .budget_models import LM, WIDTH, Asking, Block, Caching, Positions, batch

CPU = torch.device("cpu")


def tried(
    model: nn.Module, inputs: Any, policy: MixedPrecisionPolicy | None = None, **more: Any
) -> Division:
    subject = Subject(model, CPU, policy or MixedPrecisionPolicy(), Budget(inputs=inputs, **more))
    return divide(subject, repeated_blocks(model))


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = make()
    return model


@pytest.mark.parametrize("make", [LM, Asking])
def test_nothing_changes(make: type[nn.Module]) -> None:
    torch.manual_seed(3)
    model = make().eval()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(model.state_dict())
    tensors = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    hooks = [len(each._forward_hooks) for each in model.modules()]
    states = torch.get_rng_state(), random.getstate()
    tried(model, batch())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert {n: id(tensor) for n, tensor in model.state_dict(keep_vars=True).items()} == tensors
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before.items())
    assert all(param.grad is None for param in model.parameters())
    assert [len(each._forward_hooks) for each in model.modules()] == hooks
    assert not model.training
    assert "forward" not in vars(model.blocks[0])


@pytest.mark.parametrize(
    "make", [LM, lambda: on_meta(LM), lambda: on_meta(Positions), Asking]
)  # fmt: skip
def test_units_times_and_activations(make: Any) -> None:
    division = tried(make(), batch())
    assert [(unit.title, unit.count) for unit in division.model.units] == [
        ("root", 1),
        ("blocks.0-3", 4),
    ]
    assert all(each.forward_s > 0 and each.backward_s > 0 for each in division.times)
    peaks = {mode: trace.highest_bytes for mode, trace in division.traces.items()}
    assert peaks["recompute"] < peaks["keep"]


def test_recomputed_forwards_keep_a_state_of_random_numbers() -> None:
    kept = {}
    for has_streams in (False, True):
        with mock.patch.object(devices, "has_streams", return_value=has_streams):
            trace = tried(LM(), batch()).traces["recompute"]
        ends = [each for each in trace.moments if each.event is Event.END_OF_FORWARD]
        kept[has_streams] = [each.live_bytes for each in ends if each.unit]
    more = [cpu - other for cpu, other in zip(kept[False], kept[True], strict=True)]
    assert more == [torch.get_rng_state().numel() * (number + 1) for number in range(4)]


def test_a_trace_on_a_device_is_that_on_meta() -> None:
    on_device, without = tried(Asking(), batch()), tried(LM(), batch())
    # The comparison of labels has made a few bytes.
    for mode, trace in without.traces.items():
        assert abs(on_device.traces[mode].highest_bytes - trace.highest_bytes) < 1 << 10


def test_without_inputs_there_are_only_parameters() -> None:
    division = tried(LM(), None)
    assert division.traces == {}
    assert {each.forward_s for each in division.times} == {0.0}


def test_a_forward_that_needs_values_has_to_be_on_a_device() -> None:
    with pytest.raises(PlanError, match=r"Asking does not run on a copy without values.*make the"):
        tried(on_meta(Asking), batch())


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(PlanError, match=r"LM on cpu.*unexpected keyword argument 'tokens'"):
        tried(LM(), {"tokens": batch()["ids"]})


def test_a_cache_is_as_in_the_first_run() -> None:
    division = tried(Caching(), torch.randn(1, WIDTH))
    assert division.times[1].forward_s > 0


def test_frozen_blocks_have_no_backward() -> None:
    model = LM().requires_grad_(False)
    model.blocks[3].requires_grad_(True)
    division = tried(model, batch())
    titles = [unit.title for unit in division.model.units]
    assert titles == ["root", "blocks.0-2", "blocks.3"]
    assert division.times[1].backward_s < 0.1 * division.times[2].backward_s


def test_the_dtype_of_compute_counts() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    wide = tried(model, torch.randn(64, WIDTH)).traces["keep"].highest_bytes
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    narrow = tried(model, torch.randn(64, WIDTH), policy).traces["keep"].highest_bytes
    assert narrow < 0.8 * wide


def test_a_loss_of_the_user() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    seen = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        seen.append(output.device.type)
        return output.square().mean()

    tried(model, torch.randn(2, WIDTH), loss=loss)
    assert set(seen) == {"meta", "cpu"}


def test_a_loss_with_targets() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)))
    targets = torch.tensor([1, 2, 3])

    def loss(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, targets)

    division = tried(model, torch.randn(3, WIDTH), loss=loss)
    assert division.times[0].backward_s > 0


def test_a_twin_shares_nothing_and_keeps_ties() -> None:
    model = LM()
    twin = meta_twin(model)
    assert isinstance(twin, LM)
    assert twin.head.weight is twin.embed.weight
    assert twin.scale.is_meta
    assert all(tensor.is_meta for tensor in twin.state_dict(keep_vars=True).values())
    assert model.head.weight is model.embed.weight


def test_a_weight_of_the_root_in_a_block() -> None:
    model = LM()
    model.blocks[1].again = nn.Linear(WIDTH, 64, bias=False)
    model.blocks[1].again.weight = model.embed.weight
    division = tried(model, batch())
    root = division.model.units[0]
    assert [tensor.name for tensor in root.groups[0].tensors] == ["embed.weight"]
    assert division.times[0].forward_s > 0


def test_weights_that_are_not_contiguous() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    model.to(memory_format=torch.channels_last)
    division = tried(model, torch.randn(2, 3, 8, 8))
    assert division.times[0].forward_s + division.times[1].forward_s > 0


def test_a_model_that_cannot_be_copied() -> None:
    model = LM()
    model.lines = (line for line in ())  # generators cannot be copied
    with pytest.raises(ValueError, match=r"copy\.deepcopy of LM raised TypeError: cannot pickle"):
        tried(model, batch())


def test_without_inputs_nothing_is_copied() -> None:
    model = LM()
    model.lines = (line for line in ())
    assert tried(model, None).model.num_parameters > 0


def test_a_forward_that_copies_would_share() -> None:
    model = LM()
    forward = model.blocks[1].forward
    model.blocks[1].forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(PlanError, match=r"the forward of LM\.blocks\.1 was replaced by a function"):
        tried(model, batch())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def test_reentrant_checkpoints() -> None:
    division = tried(on_meta(Checkpointed), torch.randn(2, 8))
    assert division.model.num_units == 4
    assert division.times[1].backward_s > 0


class Masked(Checkpointed):
    """Asks whether there is padding, in both ways of transformers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > x - 1
        if not (mask.all() and mask.sum() == mask.numel()):
            raise ValueError("padding")
        return super().forward(x)


class Dropping(Checkpointed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                x = block(x)
        return x


def test_questions_about_padding() -> None:
    assert tried(on_meta(Masked), torch.randn(2, 8)).traces


def test_layers_left_out_at_random_are_the_same_on_all_ranks() -> None:
    names = set()
    for seed in range(4):
        torch.manual_seed(seed)
        names.add(tried(Dropping(), torch.randn(2, 8)).model.modules)
    assert len(names) == 1


def test_the_loss_is_a_tensor_with_a_gradient() -> None:
    ids, scores = torch.ones(3), torch.ones(3, requires_grad=True)
    assert loss_of({"ids": ids, "scores": scores}).requires_grad


class Bypassing(LM):
    """Reads a block's weight outside of its forward, and does not call another block."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.asks and labels.sum() < 0:
            raise ValueError("no labels")
        x = self.embed(ids) + self.blocks[1].down.bias
        for block in (self.blocks[0], self.blocks[1], self.blocks[3]):
            x = block(x, scale=self.scale)["x"]
        return {"loss": self.head(x).sum()}


@pytest.mark.parametrize("asks", [False, True])
def test_modules_that_are_read_from_outside_are_no_units(asks: bool) -> None:
    model = Bypassing()
    model.asks = asks
    division = tried(model, batch())
    assert division.model.modules == ((), ("blocks.0",), ("blocks.3",))
    assert "blocks.2.up.weight" in [t.name for t in division.model.units[0].groups[0].tensors]


def test_kinds_of_blocks() -> None:
    one, other = Block(), Block()
    assert kind_of(one) == kind_of(other)
    other.drop.p = 0.0
    assert kind_of(one) != kind_of(other)
    assert kind_of(one) != kind_of(Block(2 * WIDTH))


def test_large_blocks_are_divided_too() -> None:
    model = LM()
    names = {id(child): name for name, child in model.named_modules()}
    (usual,) = divisions_to_try(model, 1 << 30, 4, has_inputs=True)
    assert divisions_to_try(model, 1 << 16, 4, has_inputs=False) == [usual]
    assert [names[id(unit)] for unit in usual] == [f"blocks.{i}" for i in range(4)]
    _, smaller = divisions_to_try(model, 1 << 16, 4, has_inputs=True)
    assert [names[id(unit)] for unit in smaller[:3]] == [
        "blocks.0.norm",
        "blocks.0.up",
        "blocks.0.down",
    ]
