"""Ranks leave out units whose forward runs again in backward, or whose place in an order is odd.

Each case trains beside a plain model on the same ranks, and compares the averaged gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import averaged_gradients, full_gradients
from .models import make

TIMEOUT_S = 30
Where = Callable[[int, int], bool]  # of step and rank: whether it leaves the unit out


def rank_0(step: int, rank: int) -> bool:
    return rank == 0


def rank_0_later(step: int, rank: int) -> bool:
    return rank == 0 and step > 0


def in_turn(step: int, rank: int) -> bool:
    return (step + rank) % 2 == 0


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Stretch(nn.Module):
    """Three units that run again together."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.first = layer(), layer(), layer(), layer()

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        def run(x: Tensor) -> Tensor:
            y: Tensor = self.c(self.b(x if leaves_out else self.a(x)))
            return y

        y: Tensor = checkpoint(run, self.first(x), use_reentrant=self.reentrant)
        return y

    @property
    def units(self) -> list[nn.Module]:
        return [self.a, self.b, self.c]


class ReentrantStretch(Stretch):
    reentrant = True


class Inside(nn.Module):
    """A unit inside of one that runs again, in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.inner = layer(), layer(), layer()
        self.outer = nn.ModuleList([self.own, self.inner])

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        def run(x: Tensor) -> Tensor:
            x = self.own(x)
            return x if leaves_out else self.inner(x)

        y: Tensor = checkpoint(run, self.first(x), use_reentrant=True)
        return y

    @property
    def units(self) -> list[nn.Module]:
        return [self.inner, self.own]


class Nested(nn.Module):
    """A reentrant checkpoint inside of one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = layer(), layer(), layer()

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return x if leaves_out else self.a(x)

        def outer(x: Tensor) -> Tensor:
            y: Tensor = self.b(checkpoint(inner, x, use_reentrant=True))
            return y

        y: Tensor = checkpoint(outer, self.first(x), use_reentrant=False)
        return y

    @property
    def units(self) -> list[nn.Module]:
        return [self.a, self.b]


class EmptyRoot(nn.Module):
    """The root has no parameters of its own; a rank may run none of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.a = layer()

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        y: Tensor = x * 2 if leaves_out else self.a(x)
        return y

    @property
    def units(self) -> list[nn.Module]:
        return [self.a]


class EmptyAround(nn.Module):
    """Units around others have no parameters, and run for the first time in a later step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layer()
        self.around = nn.Sequential(nn.ModuleList([layer(), layer()]), nn.Identity())
        self.is_first = True

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        x = self.first(x)
        for each in () if self.is_first else self.inside:
            x = x if leaves_out and each is self.inside[0] else each(x)
        self.is_first = False
        return x

    @property
    def inside(self) -> nn.ModuleList:
        inside = self.around[0]
        assert isinstance(inside, nn.ModuleList)
        return inside

    @property
    def units(self) -> list[nn.Module]:
        return [*self.inside, self.around]


ONE, SUM = ("one",) * 4, ("sum",) * 4  # how the forwards and backwards of a step follow
MIXED = ("two", "sum", "two", "sum")
CROSSED = ("crossed", "one", "sum", "crossed")


def run_backward(outputs: list[Tensor], order: str) -> None:
    if order in ("one", "sum"):
        torch.stack(outputs).sum().backward()
    else:  # "two", or with the last forward first: "crossed"
        for output in outputs[:: -1 if order == "crossed" else 1]:
            output.sum().backward()


def check(
    model_class: type[nn.Module], where: Where, orders: tuple[str, ...], reshard: bool | None
) -> None:
    plain = make(model_class).double()
    model = copy.deepcopy(plain)
    for unit in model.units:  # type: ignore[union-attr]
        fully_shard(unit, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    rank = dist.get_rank()
    for step, order in enumerate(orders):
        x = torch.full((2, 4), 0.1 * (step + 1) * (rank + 1), dtype=torch.double)
        for each in (plain, model):
            inputs = x.clone().requires_grad_()
            num_forwards = 1 if order == "one" else 2
            outputs = [each(inputs, where(step, rank)) for _ in range(num_forwards)]
            run_backward(outputs, order)
        expected, found = averaged_gradients(plain), full_gradients(model)
        for name, gradient in expected.items():
            torch.testing.assert_close(
                found[name], gradient, msg=lambda m, where=f"step {step}: {name}": f"{where} {m}"
            )
        plain.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("where", [rank_0, rank_0_later, in_turn])
@pytest.mark.parametrize(
    "model_class", [Stretch, ReentrantStretch, Inside, Nested, EmptyRoot, EmptyAround]
)
@pytest.mark.sampled(9)
def test_ranks_leave_out_units(model_class: type[nn.Module], where: Where) -> None:
    run_ranks(check, 2, model_class, where, ONE, None, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("reshard", [None, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("where", [rank_0, rank_0_later, in_turn])
@pytest.mark.parametrize("model_class", [Stretch, ReentrantStretch, Inside, Nested])
@pytest.mark.sampled(3)
def test_ranks_leave_out_units_of_two_forwards_before_a_backward(
    model_class: type[nn.Module], where: Where, reshard: bool | None
) -> None:
    run_ranks(check, 2, model_class, where, SUM, reshard, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("orders", [MIXED, CROSSED])
@pytest.mark.parametrize("where", [rank_0, in_turn])
@pytest.mark.parametrize("model_class", [Stretch, ReentrantStretch, Inside, Nested])
@pytest.mark.sampled(3)
def test_ranks_leave_out_units_while_steps_change_their_order(
    model_class: type[nn.Module], where: Where, orders: tuple[str, ...]
) -> None:
    run_ranks(check, 2, model_class, where, orders, None, timeout_s=TIMEOUT_S)


def check_second_backward() -> None:
    """The second backward of a graph gathers what was kept for the first, on one rank alone."""
    plain = make(EmptyRoot).double()
    model = copy.deepcopy(plain)
    fully_shard(model.a, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    x = torch.ones(2, 4, dtype=torch.double, requires_grad=True)
    for step in range(4):
        leaves_out = step == 0 or in_turn(step, dist.get_rank())
        for each in (plain, model):
            loss = each(x, leaves_out).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        torch.testing.assert_close(full_gradients(model), averaged_gradients(plain))
        plain.zero_grad()
        model.zero_grad()


def test_a_second_backward_gathers_on_one_rank_what_the_first_has_kept() -> None:
    run_ranks(check_second_backward, 2, timeout_s=TIMEOUT_S)


class Twins(nn.Module):
    """Two modules in one unit, of which a rank may leave out one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.between, self.other = layer(), layer(), layer()

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        x = self.between(self.one(x))
        y: Tensor = x if leaves_out else self.other(x)
        return y


def check_second_backward_of_a_list() -> None:
    """As a GAN's or a meta-learner's loss that is taken twice from one graph."""
    plain = make(Twins).double()
    model = copy.deepcopy(plain)
    fully_shard(model.between, reshard_after_forward=False)
    fully_shard([model.one, model.other], reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    x = torch.ones(2, 4, dtype=torch.double, requires_grad=True)
    for step in range(4):
        leaves_out = step == 0 or in_turn(step, dist.get_rank())
        for each in (plain, model):
            loss = each(x, leaves_out).square().sum()
            for _ in range(2):
                loss.backward(retain_graph=True)
        del loss
        torch.testing.assert_close(full_gradients(model), averaged_gradients(plain))
        plain.zero_grad()
        model.zero_grad()


def test_a_second_backward_waits_for_all_modules_of_a_unit() -> None:
    run_ranks(check_second_backward_of_a_list, 2, timeout_s=TIMEOUT_S)


class FrozenBehind(nn.Module):
    """Whether the inputs of a frozen unit want gradients depends on what a rank leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = layer(), layer(), layer()
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, leaves_out: bool, skips_frozen: bool) -> Tensor:
        x = x if leaves_out else self.first(x)
        y: Tensor = self.last(x if skips_frozen else self.frozen(x))
        return y


def check_frozen_behind() -> None:
    plain = make(FrozenBehind).double()
    model = copy.deepcopy(plain)
    for unit in (model.first, model.frozen, model.last, model):
        fully_shard(unit, reshard_after_forward=True)
    x, rank = torch.ones(2, 4, dtype=torch.double), dist.get_rank()
    for step in range(4):
        leaves_out, skips_frozen = (step + rank) % 2 == 1, rank == 0 and step == 0
        for each in (plain, model):
            each(x, leaves_out, skips_frozen).square().sum().backward()
        expected = {n: g for n, g in averaged_gradients(plain).items() if "frozen" not in n}
        found = full_gradients(model)
        torch.testing.assert_close({name: found[name] for name in expected}, expected)
        plain.zero_grad()
        model.zero_grad()


def test_a_frozen_unit_is_gathered_when_what_is_left_out_before_it_changes() -> None:
    run_ranks(check_frozen_behind, 2, timeout_s=TIMEOUT_S)


class Empty(nn.Module):
    """A unit without parameters between two others, under activation checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = checkpoint(each, x, use_reentrant=self.reentrant)
        return x


def check_empty(reentrant: bool) -> None:
    plain = make(Empty, reentrant)
    model = copy.deepcopy(plain)
    for each in model.layers:  # type: ignore[union-attr]
        fully_shard(each)
    fully_shard(model)
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(torch.ones(2, 4, requires_grad=True)).sum().backward()
        expected, found = averaged_gradients(plain), full_gradients(model)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_unit_without_parameters_runs_again(reentrant: bool) -> None:
    run_ranks(check_empty, 2, reentrant)


def unshard_and_leave_out() -> None:
    """Both ranks unshard a unit by hand, and one runs it."""
    model = nn.Sequential(layer(), layer())
    fully_shard(model[0])
    fully_shard(model)
    for step in range(3):
        model[0].unshard()
        x = torch.ones(2, 4)
        skips = dist.get_rank() == step % 2
        model.forward = lambda x, skips=skips: model[1](x if skips else model[0](x))  # type: ignore[method-assign,misc]
        model(x).sum().backward()
        with torch.no_grad():
            model(x)


def test_a_unit_that_is_unsharded_by_hand_may_be_left_out() -> None:
    run_ranks(unshard_and_leave_out, 2, timeout_s=TIMEOUT_S)
