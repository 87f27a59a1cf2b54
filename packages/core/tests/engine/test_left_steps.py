"""An exception that a rank catches: all leave the step, or it is an error."""

import functools
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import FSDPModule, RankMismatchError, fully_shard
from vescale_fsdp.engine import engine
from vescale_fsdp.testing import RankError, run_ranks

from .helpers import full_parameters

pytestmark = pytest.mark.usefixtures("each_alone")


class Oops(Exception):
    pass


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5), nn.Linear(5, 3))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, place: str = "") -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 5)

    def broken(*_: object) -> None:
        raise Oops

    def in_forward(module: nn.Module, args: object, output: Tensor) -> None:
        if place == "forward":
            raise Oops
        if place == "backward":
            output.register_hook(broken)

    handle = model[1].register_forward_hook(in_forward)  # type: ignore[index]
    try:
        y: Tensor = model(x)
        if place == "between":
            raise Oops
        y.square().sum().backward()
    finally:
        handle.remove()
    optimizer.step()
    optimizer.zero_grad()


def one_rank(place: str, resets: bool) -> None:
    engine.MEETING_TIMEOUT_S = 1.0
    model, optimizer = make()
    step(model, optimizer, 0)
    begun = time.monotonic()
    if dist.get_rank() == 1:
        with pytest.raises(Oops):
            step(model, optimizer, 1, place)
        assert isinstance(model, FSDPModule)
        reset = functools.partial(model.reset_iter_state, timeout_s=1.0)
        go_on = reset if resets else functools.partial(step, model, optimizer, 2)
        with pytest.raises(RankMismatchError, match=r"an exception has ended a step on this rank"):
            go_on()
        assert time.monotonic() - begun < 20
        os._exit(77)
    with pytest.raises(RuntimeError):  # the other one has gone
        step(model, optimizer, 1)


@pytest.mark.parametrize(
    ("place", "resets"),
    [("forward", False), ("backward", False), ("between", True)],
)
def test_an_exception_on_one_rank_is_an_error_before_the_next_step(
    place: str, resets: bool
) -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 77") as error:
        run_ranks(one_rank, 2, place, resets)
    assert "1 of 2 ranks failed" in str(error.value)


def all_ranks(place: str, resets: bool) -> None:
    model, optimizer = make()
    expected, other = make()
    for seed in range(4):
        if seed == 2:
            with pytest.raises(Oops):
                step(model, optimizer, seed, place)
            optimizer.zero_grad()
            if resets:
                assert isinstance(model, FSDPModule)
                model.reset_iter_state()
        else:
            step(model, optimizer, seed)
            step(expected, other, seed)
    found, wanted = full_parameters(model), full_parameters(expected)
    for name, parameter in found.items():
        assert torch.equal(parameter, wanted[name]), name  # type: ignore[arg-type]


@pytest.mark.parametrize("resets", [False, True])
def test_a_step_that_all_ranks_leave_leaves_no_trace(resets: bool) -> None:
    for place in ("forward", "backward"):
        run_ranks(all_ranks, 2, place, resets)


def alone() -> None:
    model, optimizer = make()
    step(model, optimizer, 0)
    if dist.get_rank() == 1:
        assert isinstance(model, FSDPModule)
        model.reset_iter_state(timeout_s=0.1)
    step(model, optimizer, 1)


def test_between_steps_a_reset_needs_nobody_else() -> None:
    run_ranks(alone, 2)


class Branches(nn.Module):
    """Two units, of which a rank may leave out the second."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, uses_b: bool) -> Tensor:
        y: Tensor = self.a(x)
        return self.b(y) if uses_b else y


def leaves_out_a_unit(width: int, leaves: bool) -> tuple[float, str]:
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = "20"
    torch.manual_seed(0)
    model = Branches(width)
    for unit in (model.a, model.b):
        fully_shard(unit, reshard_after_forward=False)  # nothing to wait for in backward
    fully_shard(model)
    for _ in range(2):
        model(torch.randn(2, width), True).sum().backward()

    def broken(_: Tensor) -> None:
        raise Oops

    def breaks(*args: Tensor) -> None:
        args[-1].register_hook(broken)  # after the backward of b

    handle = model.a.register_forward_hook(breaks)
    with pytest.raises(Oops):
        model(torch.randn(2, width), not leaves or dist.get_rank() > 0).sum().backward()
    handle.remove()
    begun, text = time.monotonic(), ""
    try:
        assert isinstance(model, FSDPModule)
        model.reset_iter_state(timeout_s=2.0)
        model(torch.randn(2, width), True).sum().backward()
    except RankMismatchError as error:
        text = str(error)
    return time.monotonic() - begun, text


@pytest.mark.parametrize("width", [7, 128])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_step_that_ranks_have_left_at_different_places_is_an_error_on_all(
    num_ranks: int, width: int
) -> None:
    for seconds, text in run_ranks(leaves_out_a_unit, num_ranks, width, True, timeout_s=60):
        assert "an exception has ended a step on all ranks, but not at the same place" in text
        assert "rank 0 has issued " in text
        assert seconds < 15


@pytest.mark.parametrize("width", [7, 128])
def test_a_step_that_ranks_have_left_at_one_place_is_dropped(width: int) -> None:
    assert [text for _, text in run_ranks(leaves_out_a_unit, 2, width, False, timeout_s=40)] == [
        "",
        "",
    ]
