"""The scenarios on streams of a GPU, with real ranks: NCCL sends, and kernels wait for it.

Each has to give the bits of a run in which the host waits after every collective and every task
on the copy stream, and about the numbers of gloo on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vescale_fsdp.testing import run_ranks
from vescale_fsdp.testing.nccl import nccl_group

from .scenarios import ALL_ACTIVATIONS, ALL_STATES, FOUR, NATIVE, TWO, Scenario, host_waits

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

SCENARIOS = {each.name: each for each in (*TWO, *FOUR)}


def runs_of(name: str) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    scenario = SCENARIOS[name]
    with NATIVE, ALL_ACTIVATIONS, ALL_STATES:
        on_cpu = scenario.run()
        with nccl_group():
            with host_waits():
                expected = [x.cpu() for x in scenario.run(device="cuda")]
            found = [x.cpu() for x in scenario.run(device="cuda")]
            torch.cuda.synchronize()
    return found, expected, on_cpu


@pytest.mark.parametrize("name", [each.name for each in TWO])
def test_two_ranks(name: str) -> None:
    check(SCENARIOS[name], 2)


@pytest.mark.parametrize("name", [each.name for each in FOUR])
def test_four_ranks(name: str) -> None:
    check(SCENARIOS[name], 4)


def check(scenario: Scenario, num_ranks: int) -> None:
    for found, expected, on_cpu in run_ranks(runs_of, num_ranks, scenario.name, timeout_s=90):
        for number, (value, right) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(value, right), f"value {number} is {value}, expected {right}"
        if scenario.name not in ("Muon", "SOAP"):  # they magnify rounding errors of gradients
            torch.testing.assert_close(found, on_cpu, rtol=0.05, atol=0.02)
