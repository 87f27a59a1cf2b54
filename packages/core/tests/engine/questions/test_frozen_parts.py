"""Frozen parameters and units: what is before them and in them trains, and the input, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .asking import (
    WIDTH,
    Answers,
    Block,
    Case,
    Cases,
    Net,
    Outcomes,
    answer,
    as_one_process,
    backward,
    batch,
    check_models,
    check_rests,
    in_settings,
    is_sharded,
    named,
    pair,
    part,
    squares,
)

Choose = Callable[[Any], Iterator[nn.Module]]
FROZEN: dict[str, Choose] = {
    "all units": lambda model: iter(model.blocks),
    "the first units": lambda model: iter(model.blocks[:2]),
    "a unit in the middle": lambda model: iter(model.blocks[1:2]),
    "a part of each unit": lambda model: (block.a for block in model.blocks),
    "the root's": lambda model: iter([model.head]),
    "all but the first unit": lambda model: iter([*model.blocks[1:], model.head]),
}


def freezing(choose: Choose) -> Callable[[], Net]:
    def make() -> Net:
        model = Net()
        for module in choose(model):
            module.requires_grad_(False)
        return model

    return make


class Adapted(nn.Module):
    """A frozen layer with a product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(2, WIDTH))
        self.up = nn.Parameter(0.1 * torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class AdaptedBlock(Block):
    """Begins and ends with what is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.a = Adapted(self.a)  # type: ignore[assignment]
        self.b.requires_grad_(False)


def with_input(model: Any, x: Tensor) -> Tensor:
    """The gradient by a row does not depend on how many there are."""
    x = x.clone().requires_grad_()
    squares(model, x).backward()
    assert x.grad is not None
    return x.grad * len(x)


def compiled(model: Any, x: Tensor) -> None:
    if is_sharded(model):
        for block in model.blocks:
            block.compile(backend="aot_eager")
    backward(model, x)


class Generator(Net):
    """As wide as what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)


def toggled() -> None:
    """A unit is frozen in every second step."""
    plain, model = pair()
    for step in range(4):
        for each, x in ((plain, batch(step)), (model, part(batch(step)))):
            each.blocks[1].requires_grad_(step % 2 == 0)
            each.zero_grad()
            backward(each, x)
        check_models(plain, model, f"step {step}")
        check_rests(model)


def adversaries() -> None:
    """One learns through the other, which is frozen meanwhile and then learns itself."""
    generators, critics = pair(Generator), pair(Net)
    for step in range(3):
        x = batch(step)
        for generator, critic, rows in zip(generators, critics, (x, part(x)), strict=True):
            for model in (generator, critic):
                model.zero_grad()
            critic.requires_grad_(False)
            critic(generator(rows)).mean().backward()
            critic.requires_grad_(True)
            made = generator(rows).detach()
            (critic(made).square().mean() + critic(rows).mean()).backward()
        for plain, model in (generators, critics):
            check_models(plain, model, f"step {step}")
        check_rests(critics[1])


def without_gradients(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """Two evaluations, a write, an evaluation, and a step."""
    plain, model = pair()
    x = batch(0)
    for each, rows in ((plain, x), (model, part(x))):
        each.eval()
        found = []
        for _ in range(2):
            with mode():
                found.append(each(rows).clone())
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(1.5)
        with mode():
            found.append(each(rows).clone())
        if each is plain:
            expected = found
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, part(other))
    check_rests(model)
    for each, rows in ((plain, batch(1)), (model, part(batch(1)))):
        backward(each.train(), rows)
    check_models(plain, model)


def cases() -> Cases:
    found: Cases = {}
    for name, choose in FROZEN.items():
        make = freezing(choose)
        found[name] = Case(lambda make=make: as_one_process(make))
        found |= in_settings(f"{name}, with an input", as_one_process, make=make, run=with_input)
    middle = freezing(FROZEN["a unit in the middle"])
    found["a unit in the middle, compiled"] = Case(lambda: as_one_process(middle, compiled))
    adapted = lambda: Net(AdaptedBlock)  # noqa: E731
    found |= in_settings("adapters", as_one_process, make=adapted, run=with_input)
    found["adapters, compiled"] = Case(lambda: as_one_process(adapted, compiled))
    found["toggled"] = Case(toggled)
    found["adversaries"] = Case(adversaries)
    found["no_grad"] = Case(lambda: without_gradients(torch.no_grad))
    found["inference_mode"] = Case(lambda: without_gradients(torch.inference_mode))
    return found


CASES = cases()


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", named(CASES))
def test_training_beside_frozen_parts_is_that_of_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
