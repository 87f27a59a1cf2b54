"""Writes to parameters inside of a forward: the rest of the forward sees them, and they stay.

Where the forward has saved what is overwritten, autograd raises in backward, as in one process.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD

from .asking import (
    CLASSES,
    WIDTH,
    Answers,
    Block,
    Case,
    Cases,
    Net,
    Outcomes,
    answer,
    as_one_process,
    batch,
    in_settings,
    is_sharded,
    listed,
    named,
    pair,
    part,
    squares,
)

Params = Sequence[nn.Parameter]
Write = Callable[[Params], object]


def each(change: Callable[[nn.Parameter], object]) -> Write:
    def write(params: Params) -> None:
        for param in params:
            change(param)

    return write


def assign(param: nn.Parameter) -> None:
    param.data = param.data * 0.5


WRITES: dict[str, Write] = {
    "zeros": each(lambda p: p.mul_(0)),
    "copy": each(lambda p: p.copy_(p * 0.5)),
    "to the first": lambda params: params[0].add_(1),
    "foreach": lambda params: torch._foreach_mul_(list(params), 0.5),
    "foreach lerp": lambda params: torch._foreach_lerp_(
        list(params), [torch.ones_like(p) for p in params], 0.1
    ),
    "data": each(lambda p: p.data.mul_(0.5)),
    "data assigned": each(assign),
    "detached": each(lambda p: p.detach().mul_(0.5)),
    "flattened": each(lambda p: p.flatten().mul_(0.5)),
    "out": each(lambda p: torch.mul(p, 0.5, out=p)),
    "init": each(lambda p: nn.init.constant_(p, 0.1)),
    "clamp": each(lambda p: p.clamp_(-0.05, 0.05)),
    "data copied": each(lambda p: p.data.copy_(torch.full_like(p, 0.1))),
}
CHANGED = "modified by an inplace operation"  # what autograd says of it
SHORT = ("zeros", "foreach")  # where not all of them are tried


class Writing(Net):
    write: Write

    def change(self, *modules: nn.Module) -> None:
        with torch.no_grad():
            self.write([param for module in modules for param in module.parameters()])


class Between(Writing):
    """Between two uses. The first one's input needs no gradient, so it saves no weight."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x)
        before = self.head(x.detach())
        self.change(self.head)
        return before + self.head(x)


class First(Writing):
    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return super().forward(x)


class Saved(Writing):
    """The first use has saved the weight."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x)
        before = self.head(x)
        self.change(self.head)
        return before + self.head(x)


class SavedOfTwo(Writing):
    """Of two layers that are written to at once, the second was saved."""

    at_once = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x)
        before = self.second(x)
        if self.at_once:
            self.change(self.first, self.second)
            between = self.first(x)
        else:
            self.change(self.first)
            between = self.first(x)
            self.change(self.second)
        return self.head(before + between + self.first(x))


class SavedOneByOne(SavedOfTwo):
    at_once = False


class WritingBlock(Block):
    write: Write

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(x.detach())
        with torch.no_grad():
            self.write(list(self.parameters()))
        return super().forward(x) + y


class InBlocks(Writing):
    """Each unit writes to its own."""

    def __init__(self) -> None:
        super().__init__(WritingBlock)


class NextUnit(Writing):
    """To the next unit's, which may be on its way."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.change(self.blocks[1])
        x = self.blocks[1](x)
        self.change(self.blocks[2].b)  # type: ignore[union-attr]
        return self.head(self.blocks[2](x))


class ThenFunctional(Writing):
    """After the write, one of two parameters is replaced for a call."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x)
        self.change(self.head)
        ones = torch.ones(CLASSES, WIDTH, dtype=x.dtype)
        return functional_call(self.head, {"weight": ones}, (x,)) + self.head(x)


class Recurrent(Writing):
    """To a module that keeps its parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LSTM(WIDTH, CLASSES)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x)
        before = self.head(x.detach()[None])[0][0]
        self.change(self.head)
        return before + self.head(x[None])[0][0]


class ByAttribute(Writing):
    """Through ``module.weight``."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x)
        before = self.head(x.detach())
        with torch.no_grad():
            self.head.weight.mul_(0.5)
            self.blocks[1].a.bias.clamp_(-0.01, 0.01)  # type: ignore[union-attr]
        return before + self.head(x)


class ByAttributeInBlock(Block):
    """Clips a bias in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.bias.clamp_(-0.01, 0.01)
        return super().forward(x)


class ByDataOfAttribute(Block):
    """Nothing tells of it, and FSDP2 loses it, too. Each rank has a part of what is written to."""

    def forward(self, x: Tensor) -> Tensor:
        for param in (self.a.weight, self.a.bias, self.b.weight, self.b.bias):
            param.data.clamp_(-0.01, 0.01)
        return super().forward(x)


class AfterUse(Block):
    """What is saved is overwritten by attribute."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.b.weight.mul_(2)
        return y


class WithoutNoGrad(Writing):
    """One process refuses it: a leaf that requires grad."""

    def forward(self, x: Tensor) -> Tensor:
        next(self.head.parameters()).mul_(2)
        return super().forward(x)


class WithoutNoGradByAttribute(Writing):
    def forward(self, x: Tensor) -> Tensor:
        self.head.weight.mul_(2)
        return super().forward(x)


class Follows(nn.Module):
    """A teacher follows in the root's forward: a part of the root's own, and a unit."""

    def __init__(self, follow: Callable[[Params, Params], object]) -> None:
        super().__init__()
        self.follow = follow
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.slow_head = copy.deepcopy(self.head).requires_grad_(False)
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.blocks[0](x))
        with torch.no_grad():
            self.slow_head(x)
            for mine, theirs in ((self.blocks[1], self.blocks[0]), (self.slow_head, self.head)):
                self.follow(list(mine.parameters()), list(theirs.parameters()))
            z = self.slow_head(self.blocks[1](x))
        return y - z


def follow_by_lerp(mine: Params, theirs: Params) -> None:
    for one, other in zip(mine, theirs, strict=True):
        one.lerp_(other, 0.3)


def follow_by_foreach(mine: Params, theirs: Params) -> None:
    torch._foreach_lerp_(list(mine), list(theirs), 0.3)


def follow_by_data(mine: Params, theirs: Params) -> None:
    for one, other in zip(mine, theirs, strict=True):
        one.data = one.data * 0.7 + other.data * 0.3


def steps(model: Any, x: Tensor, write: Write, trains: bool, compiles: str) -> Tensor | None:
    for module in model.modules():
        module.write = write
    if compiles and is_sharded(model):
        (model if compiles == "model" else model.head).compile(backend="aot_eager")
    if not trains:
        with torch.no_grad():
            y: Tensor = model(x)
        return y
    squares(model, x).backward()
    SGD(model.parameters(), 0.1).step()
    return None


def check(
    make: Callable[[], nn.Module],
    write: str = "zeros",
    trains: bool = True,
    compiles: str = "",
    **options: Any,
) -> None:
    def run(model: Any, x: Tensor) -> Tensor | None:
        return steps(model, x, WRITES[write], trains, compiles)

    as_one_process(make, run, **options)


def data_of_an_attribute() -> None:
    """A mode that compares what is freed with what was gathered says so."""
    with patch.dict(os.environ, VESCALE_FSDP_CHECK_MEMORY="1"):
        _, model = pair(lambda: Net(ByDataOfAttribute))
        with pytest.raises(RuntimeError, match=r"\.data"):
            squares(model, part(batch(0))).backward()


def cases() -> Cases:
    found: Cases = {}
    for name in WRITES:
        found[f"Between, {name}"] = Case(lambda name=name: check(Between, name))
    for name in SHORT:
        found[f"Between, {name}, root resharded"] = Case(
            lambda name=name: check(Between, name, reshard_after_forward=True)
        )
        for kind in (First, InBlocks, NextUnit, Recurrent):
            found[f"{kind.__name__}, {name}"] = Case(lambda kind=kind, name=name: check(kind, name))
        for kind in (Saved, SavedOfTwo, SavedOneByOne):
            found[f"{kind.__name__}, {name}"] = Case(
                lambda kind=kind, name=name: check(kind, name, raises=CHANGED)
            )
        for kind in (Between, NextUnit, Recurrent):
            found[f"{kind.__name__}, {name}, not trained"] = Case(
                lambda kind=kind, name=name: check(kind, name, trains=False)
            )
    for what in ("head", "model"):
        found[f"Between, compiled {what}"] = Case(lambda what=what: check(Between, compiles=what))
    for follow in (follow_by_lerp, follow_by_foreach, follow_by_data):
        make = lambda follow=follow: Follows(follow)  # noqa: E731
        found |= in_settings(follow.__name__, check, make=make)
    found |= in_settings("ThenFunctional", check, make=ThenFunctional)
    found |= in_settings("ByAttribute", check, make=ByAttribute)
    found |= in_settings("ByAttributeInBlock", check, make=lambda: Net(ByAttributeInBlock))
    found |= in_settings("AfterUse", check, make=lambda: Net(AfterUse), raises=CHANGED)
    for kind in (WithoutNoGrad, WithoutNoGradByAttribute):
        found |= in_settings(kind.__name__, check, make=kind, raises="leaf Variable")
    found["by data of the attribute, checked"] = Case(data_of_an_attribute)
    return found


OTHERWISE = {
    "Between, compiled model": "in one graph the second read is not looked up again",
}
CASES = listed(cases(), OTHERWISE)


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", named(CASES))
def test_writes_are_those_of_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
