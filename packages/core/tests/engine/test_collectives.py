"""How many collectives are issued, when, and that nobody waits for them at once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import shard_units
from .models import MLP, TinyGPT, gpt_loss, make, tokens_of
from .recorders import Recorder

pytestmark = pytest.mark.usefixtures("each_alone")

Counts = tuple[int, int, int, int]


class ScaledMLP(MLP):
    """Four units: three layers, and the root with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def sharded_mlp(**options: object) -> nn.Module:
    model = make(ScaledMLP)
    return shard_units(model, model.layers, **options)


def counts_of_a_step(model: nn.Module) -> Counts:
    """Gathers in forward and backward, reductions in forward and backward."""
    with Recorder() as forward:
        loss = model(torch.ones(2, 5)).sum()
    with Recorder() as backward:
        loss.backward()
    recorders = (forward, backward)
    gathers = tuple(recorder.count("gathers") for recorder in recorders)
    reductions = tuple(recorder.count("reductions") for recorder in recorders)
    assert sum(gathers + reductions) == len(forward.events + backward.events), "other collectives"
    return *gathers, *reductions


def counts_of_three_steps(reshard_after_forward: bool | None) -> list[Counts]:
    model = sharded_mlp(reshard_after_forward=reshard_after_forward)
    return [counts_of_a_step(model) for _ in range(3)]


@pytest.mark.parametrize(
    ("reshard_after_forward", "expected"),
    [
        (None, (4, 3, 0, 4)),  # the root stays gathered
        (True, (4, 4, 0, 4)),
        (False, (4, 0, 0, 4)),
    ],
)
def test_one_gather_each_way_and_one_reduction_a_group(
    reshard_after_forward: bool | None, expected: Counts
) -> None:
    assert run_ranks(counts_of_three_steps, 2, reshard_after_forward) == [[expected] * 3] * 2


def counts_without_sync() -> list[Counts]:
    model = sharded_mlp()
    counts = []
    for is_last in (True, False, False, True):
        model.set_requires_gradient_sync(is_last)
        counts.append(counts_of_a_step(model))
    return counts


def test_backward_without_sync_reduces_nothing() -> None:
    reducing, silent = (4, 3, 0, 4), (4, 3, 0, 0)
    assert run_ranks(counts_without_sync, 2) == [[reducing, silent, silent, reducing]] * 2


def counts_with_frozen_unit() -> Counts:
    model = make(ScaledMLP)
    model.layers[1].requires_grad_(False)
    shard_units(model, model.layers)
    counts_of_a_step(model)
    return counts_of_a_step(model)


def test_frozen_unit_is_gathered_but_not_reduced() -> None:
    # In backward it is needed for the gradient of its input.
    assert run_ranks(counts_with_frozen_unit, 2) == [(4, 3, 0, 3)] * 2


def counts_in_evaluation() -> tuple[int, int]:
    model = sharded_mlp()
    with torch.no_grad(), Recorder() as recorder:
        model(torch.ones(2, 5))
        model(torch.ones(2, 5))
    return recorder.count("gathers"), recorder.count("reductions")


def test_evaluation_gathers_only() -> None:
    # The root may stay gathered from the first forward to the second.
    for gathers, reductions in run_ranks(counts_in_evaluation, 2):
        assert gathers in (7, 8)
        assert reductions == 0


def counts_of_one_rank() -> Counts:
    return counts_of_a_step(sharded_mlp())


def test_one_rank_needs_no_collectives() -> None:
    assert run_ranks(counts_of_one_rank, 1) == [(0, 0, 0, 0)]


def names_by_comm_debug_mode() -> dict[str, int]:
    model = make(TinyGPT)
    shard_units(model, model.blocks)
    gpt_loss(model, tokens_of(0, 0)).backward()
    with warnings.catch_warnings(), CommDebugMode() as mode:
        warnings.simplefilter("ignore")  # the mode's own hooks warn of integer inputs
        gpt_loss(model, tokens_of(1, 0)).backward()
    return {str(name).split(".")[-1]: count for name, count in mode.get_comm_counts().items()}


def test_native_reduction_makes_the_calls_of_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESCALE_FSDP_REDUCE", "native")
    # Two blocks and the root: 3 gathers in forward, 2 in backward, 3 reductions.
    expected = {"_allgather_base_": 5, "_reduce_scatter_base_": 3}
    assert run_ranks(names_by_comm_debug_mode, 2) == [expected] * 2


def test_automatic_reduction_on_gloo_is_an_all_to_all() -> None:
    expected = {"_allgather_base_": 5, "alltoall_base_": 3}
    assert run_ranks(names_by_comm_debug_mode, 2) == [expected] * 2


def asynchronous_of_a_step() -> set[tuple[str, bool]]:
    model = sharded_mlp()
    with Recorder() as recorder:
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
    return {(event.name, event.is_async) for event in recorder.events}


def test_collectives_are_asynchronous_also_on_cpu() -> None:
    expected = {("_allgather_base_", True), ("alltoall_base_", True)}
    assert run_ranks(asynchronous_of_a_step, 2) == [expected] * 2


class MarkingLayer(nn.Module):
    """Marks in ``recorder`` when its own forward and its own backward begin."""

    recorder: Recorder

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        recorder = MarkingLayer.recorder
        recorder.mark("forward")
        out = self.linear(x)
        out.register_hook(lambda gradient: recorder.mark("backward"))
        return out


def gathers_at_marks() -> list[list[int]]:
    """How many gathers were issued when layer i began: in forward, in backward."""
    model = nn.Sequential(*(MarkingLayer() for _ in range(6)))
    shard_units(model, model)
    for _ in range(2):  # the first iteration records the order, the second replays it
        with Recorder() as recorder:
            MarkingLayer.recorder = recorder
            model(torch.ones(2, 5)).sum().backward()
    events = recorder.events
    forward_end = [event.name for event in events].index("backward")
    counts: list[list[int]] = [[], []]
    num_gathers = 0
    for index, event in enumerate(events):
        if index == forward_end:
            num_gathers -= 6  # those of forward
        num_gathers += event.is_gather
        if event.name in ("forward", "backward"):
            counts[event.name == "backward"].append(num_gathers)
    return counts


def test_next_gather_is_under_way_before_a_layer_begins() -> None:
    for forward, backward in run_ranks(gathers_at_marks, 2):
        for counts in (forward, backward):
            assert len(counts) == 6
            for index, count in enumerate(counts):
                # Its own gather and the next one's, or two more: in_flight is 2.
                assert min(index + 2, 6) <= count <= min(index + 3, 6), counts


def reduction_positions() -> list[str]:
    model = nn.Sequential(*(MarkingLayer() for _ in range(4)))
    shard_units(model, model)
    for _ in range(2):
        with Recorder() as recorder:
            MarkingLayer.recorder = recorder
            loss = model(torch.ones(2, 5)).sum()
            recorder.events.clear()
            loss.backward()
    return ["reduce" if event.is_reduction else event.name for event in recorder.events]


def test_reductions_start_during_backward() -> None:
    for names in run_ranks(reduction_positions, 2):
        assert names.count("reduce") == 4
        last_layer = len(names) - 1 - names[::-1].index("backward")
        assert names[:last_layer].count("reduce") >= 2


def counts_of_unshard() -> list[int]:
    model = fully_shard(make(MLP))
    counts = []
    with Recorder() as recorder:
        handle = model.unshard(async_op=True)
        assert handle is not None
        handle.wait()
        handle.wait()
        counts.append(recorder.count("gathers"))
        assert model.unshard() is None
        counts.append(recorder.count("gathers"))
        model(torch.ones(2, 5))
        counts.append(recorder.count("gathers"))
        model.reshard()
        model.unshard()
        counts.append(recorder.count("gathers"))
    return counts


def test_unshard_gathers_once_until_reshard() -> None:
    assert run_ranks(counts_of_unshard, 2) == [[1, 1, 1, 2]] * 2
