"""``VeScaleFSDPStrategy(budget=...)``."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import VeScaleFabricStrategy, VeScaleFSDPStrategy
from vescale_fsdp_tune import Budget, tuning_of
from vescale_fsdp_tune.budget import choose
from vescale_fsdp_tune.budget.machine import measured_machine
from vescale_fsdp_tune.costs import Machine

from .lit import VOCABULARY, LitModel, Run, assert_equal, fit, make_model
from .test_fabric import set_up

_measured: list[Machine] = []


def measured_once(*arguments: Any) -> Machine:
    """The figures of the first budget serve the others: they take two seconds of two cores."""
    if not _measured:
        _measured.append(measured_machine(*arguments))
    return dataclasses.replace(_measured[0], memory_bytes=arguments[4])


class Exemplified(LitModel):
    """Shows what its forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(4, 8, dtype=torch.long)


def what_was_chosen(model: nn.Module) -> Any:
    tuning = tuning_of(model)
    assert tuning is not None
    return tuning.chosen


def check(budget: Any, root: Path, cls: type[LitModel], *, has_activations: bool) -> Run:
    """Train within a budget. Activations count if the model shows its inputs."""
    model = make_model(cls)
    run = fit(VeScaleFSDPStrategy(budget=budget), root, model)
    assert ("activations" in what_was_chosen(model).memory) is has_activations
    return run


def like_ddp(root: Path) -> None:
    expected = fit("ddp", root)
    assert_equal(check("auto", root, Exemplified, has_activations=True), expected)
    assert_equal(check("1GiB", root, LitModel, has_activations=False), expected)


def chosen_once(root: Path) -> None:
    """A file of choices gives the same training, without measuring."""
    tokens, path = torch.zeros(4, 8, dtype=torch.long), root / "choice.yaml"
    budget = Budget(memory="50%", inputs=tokens, save_to=path)
    expected = check(budget, root, LitModel, has_activations=True)
    assert_equal(fit(VeScaleFSDPStrategy(budget=str(path)), root), expected)


def mixed(root: Path) -> None:
    """Inputs of the root are not cast, those of units are, as without a budget."""
    plain = fit("vescale_fsdp", root, precision="bf16-mixed")
    tokens = torch.zeros(4, 8, dtype=torch.long)
    strategy = VeScaleFSDPStrategy(budget=Budget(memory="1GiB", inputs=tokens))
    assert_equal(fit(strategy, root, precision="bf16-mixed"), plain)


def micro_batches(root: Path) -> None:
    model = make_model(Exemplified)
    strategy = VeScaleFSDPStrategy(budget="1GiB")
    fit(strategy, root, model, accumulate_grad_batches=3)
    budget = strategy.options.budget_for(model)
    assert budget is not None
    assert budget.micro_batches == 3
    assert budget.inputs is model.example_input_array


class Manual(LitModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def manual_optimization_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match=r"budget=.* is for automatic optimization"):
        fit(VeScaleFSDPStrategy(budget="1GiB"), root, make_model(Manual))


def fabric_losses(strategy: VeScaleFabricStrategy) -> tuple[list[float], nn.Module]:
    """The losses of three steps of two micro-batches each."""
    fabric, model, optimizer = set_up(strategy)
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + fabric.global_rank)
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = model(torch.randn(4, 12, generator=generator)).square().mean()
            fabric.backward(loss)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.module


def with_fabric(root: Path) -> None:
    plain, _ = fabric_losses(VeScaleFabricStrategy())
    budget = Budget(memory="1GiB", inputs=torch.zeros(4, 12), micro_batches=2)
    losses, model = fabric_losses(VeScaleFabricStrategy(budget=budget))
    assert losses == pytest.approx(plain, rel=1e-5)  # sums in another order
    assert what_was_chosen(model).memory["activations"] > 0


@mock.patch.object(choose, "measured_machine", measured_once)
def scenario(name: str, folder: str) -> None:
    SCENARIOS[name](Path(folder))


AT_EACH_CHANGE = [like_ddp, chosen_once, micro_batches, manual_optimization_is_refused]
NIGHTLY = [mixed, with_fabric]
SCENARIOS = {each.__name__: each for each in AT_EACH_CHANGE + NIGHTLY}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if each in NIGHTLY else [])
        for name, each in SCENARIOS.items()
    ],
)
def test_budgets(name: str, tmp_path: Path) -> None:
    run_ranks(scenario, 2, name, str(tmp_path), timeout_s=120)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "ten"}, r"VeScaleFSDPStrategy\(budget='ten'\) does not work; accepted are a s"),
        ({"budget": "80%", "in_flight": 3}, "the budget chooses in_flight; use one of them"),
        ({"budget": "80%", "wrap": "none"}, "the budget chooses wrap"),
        ({"budget": "80%", "activations": "offload"}, "the budget chooses activations"),
        ({"budget": "80%", "cpu_offload": True}, "the budget chooses cpu_offload"),
        ({"budget": "80%", "gather_codec": "int8"}, "the budget chooses gather_codec"),
        ({"budget": "80%", "tensor_parallel_size": 2}, "the budget chooses tensor_parallel_size"),
    ],
)  # fmt: skip
def test_a_wrong_budget_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VeScaleFSDPStrategy(**options)


def test_without_the_companion_it_says_what_to_install() -> None:
    code = (
        "import importlib.util as util, sys\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *of: None if 'tune' in name else find(name, *of)\n"
        "sys.modules['vescale_fsdp_tune'] = None\n"  # an import raises now
        "from vescale_fsdp_lightning import VeScaleFSDPStrategy\n"
        "VeScaleFSDPStrategy()\n"
        "VeScaleFSDPStrategy(budget='80%')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: budget='80%' needs vescale_fsdp_tune, which is not installed: pip install "
        "'vescale-fsdp[tune]'"
    )


def test_the_vocabulary_holds_the_examples() -> None:
    assert int(Exemplified().example_input_array.max()) < VOCABULARY
