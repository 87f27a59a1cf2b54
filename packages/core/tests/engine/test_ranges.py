"""Ranges in profiles, and the report that ``profile`` makes of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import vescale_fsdp
from vescale_fsdp import fully_shard
from vescale_fsdp.engine import profiling
from vescale_fsdp.engine.profiling import Report, Span, own_times
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


def names_of_gathers() -> Counter[str]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model)
    weight, bias = model[0].weight.detach(), model[1].bias
    with profile(activities=[ProfilerActivity.CPU]) as found, torch.no_grad():
        bias.mul_(0.5)
        weight.add_(1.0).norm().item()
        model[0].weight.T.sum()  # a view that is no range of the storage
        bias @ bias
        weight.sort()
    names = [event.name for event in found.events() or []]
    return Counter(name for name in names if name.startswith("vescale::"))


def test_what_gathers_outside_of_a_forward_is_seen() -> None:
    for names in run_ranks(names_of_gathers, 2):
        assert names == {
            "vescale::gather(0.weight)": 1,
            "vescale::gather(1.bias)": 2,  # each operand
            "vescale::gather(shape (8, 8))": 1,  # of a tensor without a name
        }


# The report


class Slow(nn.Module):
    """Computes longer than its parameters need."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        for _ in range(50):
            y = torch.tanh(y)
        return y


def profile_steps(folder: Path | None, num_calls: int) -> Report | None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Slow(256) for _ in range(3)), nn.Linear(256, 1))
    for layer in model[:3]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with vescale_fsdp.profile(model, folder, steps=2) as profiler:
        for number in range(num_calls):
            model(torch.ones(64, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            is_done = profiler.step()
            assert is_done == (number >= 2)
    return profiler.report


def test_a_table_and_traces_come_of_two_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank, report in enumerate(run_ranks(profile_steps, 2, tmp_path / "traces", 4)):
        assert report is not None
        assert list(report.units) == ["root", "0", "1", "2"]
        for unit in ("0", "1", "2"):
            assert report.units[unit]["compute"] > 0
            assert report.units[unit]["waiting for all-gathers"] > 0
            assert report.units[unit]["waiting for reductions"] > 0
        assert report.optimizer > 0
        parts = [report.total(what) for what in report.units["0"]]
        assert sum(parts) + report.optimizer + report.other == pytest.approx(report.step)
        trace = json.loads((tmp_path / "traces" / f"rank-{rank}.json").read_text())
        assert any(each.get("name") == "vescale::unshard(1)" for each in trace["traceEvents"])
    printed = capfd.readouterr().err  # of both ranks: one table
    assert printed.count("all units") == 1


def test_fewer_steps_than_asked_for_are_reported_too() -> None:
    for report in run_ranks(profile_steps, 2, None, 2):
        assert report is not None
        assert report.step > 0
    assert run_ranks(profile_steps, 2, None, 1) == [None, None]


def test_ranges_count_without_those_inside() -> None:
    spans = [
        Span("a", 0, 100),
        Span("b", 10, 30),
        Span("c", 10, 20),
        Span("d", 40, 100),
        Span("e", 100, 110),
    ]
    assert dict(own_times(spans)) == {"a": 20, "b": 10, "c": 10, "d": 60, "e": 10}


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"compute": 90.0}, "Nothing but compute"),
        ({"waiting for all-gathers": 15.0}, "15% of a step waits for all-gathers: unshard further"),
        ({"waiting for all-gathers": 50.0}, "gather_codec"),
        ({"waiting for reductions": 30.0}, "reduce_codec"),
        ({"issuing": 30.0}, "larger units"),
    ],
)
def test_advice_names_what_costs_most(times: dict[str, float], words: str) -> None:
    assert words in Report(100.0, {"root": times}).advice


def test_advice_on_the_optimizer() -> None:
    assert "flatten_" in Report(100.0, {}, optimizer=40.0).advice
    assert Report(0.0).advice == "No step was profiled."


def test_arguments_of_profile() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1"):
        vescale_fsdp.profile(nn.Linear(1, 1), steps=0)


def profile_within_another() -> None:
    model = fully_shard(nn.Linear(4, 4))
    inner = vescale_fsdp.profile(model, warmup=0)
    with (
        mock.patch("torch.profiler.profile.start", side_effect=RuntimeError("another one")),
        pytest.raises(RuntimeError, match="another one"),
    ):
        inner.__enter__()
    assert inner._profiler is None  # there is nothing to stop
    inner.__exit__(None, None, None)


def test_a_profiler_that_does_not_start_is_not_stopped() -> None:
    run_ranks(profile_within_another, 1)


def stops_in_a_step(model: nn.Module, folder: Path) -> None:
    with vescale_fsdp.profile(model, folder, warmup=0) as profiler:
        model(torch.ones(8, 64)).sum().backward()
        profiler.step()
        raise KeyError("the user's")


def profile_with_work_after_the_last_step(folder: Path) -> list[int]:
    """How many forwards of the unit are in the report of two steps."""
    model = fully_shard(nn.Linear(64, 64))
    found = []
    make = mock.Mock(wraps=profiling.report_of)
    with mock.patch.object(profiling, "report_of", make):
        for num_evaluations in (0, 40):
            with vescale_fsdp.profile(model, warmup=1, steps=5) as profiler:
                for _ in range(3):
                    model(torch.ones(8, 64)).sum().backward()
                    profiler.step()
                for _ in range(num_evaluations):
                    model(torch.ones(8, 64))
            spans = [span for thread in make.call_args.args[0] for span in thread]
            found.append(sum(span.name.startswith("vescale::forward") for span in spans))
            assert make.call_args.args[3] == 2
        folder.write_text("not a folder")
        with pytest.raises(KeyError, match="the user's"):
            stops_in_a_step(model, folder)
    return found


def test_work_after_the_last_step_and_errors_do_not_count(tmp_path: Path) -> None:
    found = run_ranks(profile_with_work_after_the_last_step, 1, tmp_path / "file")
    assert found == [[2, 2]]
