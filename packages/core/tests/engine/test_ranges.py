"""Ranges of unshard and reduce in a profile."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks


def names_of_a_step(width: int, steps: int) -> Counter[str]:
    """Of the last step: its program is confirmed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)), nn.Linear(width, 1))
    for layer in model[:3]:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(steps - 1):
        model(torch.ones(2, width)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model(torch.ones(2, width)).sum().backward()
    names = [event.name for event in found.events() or []]
    return Counter(name for name in names if name.startswith("vescale::"))


@pytest.mark.parametrize("steps", [1, 3])
def test_each_unit_has_its_ranges(steps: int) -> None:
    for names in run_ranks(names_of_a_step, 2, 128, steps):
        for unit in ("0", "1", "2"):
            times = 1 if unit == "2" and steps > 1 else 2  # the last may stay for the backward
            assert names[f"vescale::unshard({unit})"] in (times, 2)
            assert names[f"vescale::wait_for_unshard({unit})"] in (times, 2)
            assert names[f"vescale::reduce({unit})"] == 1
            assert names[f"vescale::wait_for_reduce({unit})"] == 1
        assert names["vescale::unshard(root)"] == 1
        assert names["vescale::reduce(root)"] == 1


def test_small_units_share_ranges() -> None:
    for names in run_ranks(names_of_a_step, 2, 4, 3):
        assert names["vescale::unshard(root to 2)"] == 1
        assert any(name.startswith("vescale::reduce(2 to") for name in names)
