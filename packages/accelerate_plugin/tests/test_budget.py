"""``fsdp_vescale_budget`` and ``VeScaleFSDPPlugin(budget=...)``."""

from __future__ import annotations

import dataclasses
import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from vescale_fsdp import errors
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleFSDPPlugin
from vescale_fsdp_accelerate.budgets import budget_for, inputs_from
from vescale_fsdp_accelerate.options import from_config
from vescale_fsdp_tune import Budget, tuning_of
from vescale_fsdp_tune.budget import choose
from vescale_fsdp_tune.budget.machine import measured_machine
from vescale_fsdp_tune.costs import Machine

from .helpers import accelerator, make_loader, make_model

_measured: list[Machine] = []


def measured_once(*arguments: Any) -> Machine:
    """The figures of the first budget serve the others: they take two seconds of two cores."""
    if not _measured:
        _measured.append(measured_machine(*arguments))
    return dataclasses.replace(_measured[0], memory_bytes=arguments[4])


def losses_of(plugin: VeScaleFSDPPlugin) -> tuple[list[float], Any]:
    with accelerator(fsdp_plugin=plugin) as acc:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = acc.prepare(model, optimizer, make_loader())
        losses = []
        for (tokens,) in loader:
            loss = model(tokens).square().mean()
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, tuning_of(model)


@mock.patch.object(choose, "measured_machine", measured_once)
def budgets(path: str) -> None:
    plain, _ = losses_of(VeScaleFSDPPlugin())
    saved = Budget(memory="1GiB", save_to=path)
    for budget in ("auto", "50%", saved):
        losses, tuning = losses_of(VeScaleFSDPPlugin(budget=budget))
        assert losses == plain
        assert tuning.chosen.memory["activations"] > 0  # of the loader's first batch
    assert losses_of(VeScaleFSDPPlugin(budget=path))[0] == plain


def test_budgets(tmp_path: Any) -> None:
    run_ranks(budgets, 2, str(tmp_path / "choice.yaml"), timeout_s=120)


def contradictions() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"activation_checkpointing": True}, "fsdp_activation_checkpointing: true says"),
        ({"reshard_after_forward": False}, "fsdp_reshard_after_forward: false says"),
        ({"cpu_offload": True}, "fsdp_offload_params: true says"),
        ({"auto_wrap_policy": "transformer_based_wrap"}, "fsdp_auto_wrap_policy says"),
    ]
    for options, message in cases:
        plugin = VeScaleFSDPPlugin(budget="1GiB", **options)
        with (
            accelerator(fsdp_plugin=plugin) as acc,
            pytest.raises(ValueError, match=f"fsdp_vescale_budget: '1GiB' chooses what {message}"),
        ):
            acc.prepare(make_model())


def test_keys_of_accelerate_that_contradict_it() -> None:
    run_ranks(contradictions, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fsdp_vescale_budget": "much"}, "budget: 'much' does not work; accepted: auto"),
        ({"fsdp_vescale_budget": "80%", "fsdp_vescale_sharding": "zero1"},
         "budget: '80%' chooses sharding, and fsdp_vescale_sharding: 'zero1' is set too"),
        ({"fsdp_vescale_budget": "80%", "fsdp_vescale_in_flight": 3}, "chooses in_flight"),
        ({"fsdp_vescale_budget": "80%", "fsdp_vescale_activations": "offload"}, "activations"),
        ({"fsdp_vescale_budget": "80%", "fsdp_vescale_gather_codec": "int8"}, "gather_codec"),
    ],
)  # fmt: skip
def test_a_wrong_budget_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(config)


@pytest.mark.parametrize("value", ["auto", "80%", "10GiB", "7.5GB", "choice.yaml"])
def test_budgets_in_the_yaml(value: str) -> None:
    assert from_config({"fsdp_vescale_budget": value}).budget == value


# Inputs


class Named(Dataset[dict[str, torch.Tensor]]):
    """Items are mappings. Making one takes random numbers."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random.random()
        return {"tokens": torch.randint(0, 16, (3,))}


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        raise AssertionError("nobody may iterate")


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (x + y) * scale


def test_the_first_batch_of_a_loader() -> None:
    model = make_model()  # its forward takes tokens
    torch.manual_seed(1)
    states = torch.get_rng_state(), random.getstate()
    inputs = inputs_from(DataLoader(Named(), batch_size=2, shuffle=True), model, 1)
    assert {name: tuple(each.shape) for name, each in inputs.items()} == {"tokens": (2, 3)}
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert inputs_from(DataLoader(Named(), batch_size=8), model, 1)["tokens"].shape == (5, 3)
    assert inputs_from(DataLoader(Named(), batch_size=4), model, 2)["tokens"].shape == (2, 3)
    assert inputs_from(DataLoader(Named(), batch_size=2), Pair(), 1) is None  # takes no tokens
    assert inputs_from(DataLoader(Endless(), batch_size=2), model, 1) is None
    assert inputs_from([1, 2], model, 1) is None


class Whole(nn.Module):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["tokens"].float()


def test_a_forward_that_takes_the_batch() -> None:
    (batch,) = inputs_from(DataLoader(Named(), batch_size=2), Whole(), 1)
    assert batch["tokens"].shape == (2, 3)


def test_a_batch_of_inputs_and_targets() -> None:
    data = TensorDataset(*(torch.full((6, 2), float(number)) for number in range(3)))
    loader = DataLoader(data, batch_size=3)
    x, y = inputs_from(loader, Pair(), 1)  # and no third one
    assert (x[0, 0].item(), y[0, 0].item()) == (0.0, 1.0)
    (tokens,) = inputs_from(loader, make_model(), 1)
    assert tokens.shape == (3, 2)


def test_what_the_user_says_counts() -> None:
    model, loader = make_model(), DataLoader(Named(), batch_size=2)
    mine = Budget(memory=500, inputs=torch.zeros(1), micro_batches=2)
    found = budget_for(mine, model, [loader], 1, 7)
    assert found is not None
    assert (found.inputs is mine.inputs, found.micro_batches) == (True, 2)
    words = budget_for("auto", model, [loader], 1, 7)
    assert words is not None
    assert words.micro_batches == 7
    assert words.inputs is not None
    assert budget_for(None, model, [loader], 1, 7) is None


def test_without_the_companion_it_says_what_to_install() -> None:
    message = r"needs vescale_fsdp_tune, which is not installed: pip install 'vescale-fsdp\[tune\]'"
    with (
        mock.patch.object(errors, "find_spec", return_value=None),
        pytest.raises(ImportError, match=message),
    ):
        VeScaleFSDPPlugin(budget="80%")
