"""Writes to parameters: what comes after sees them, and they stay.

Inside of a forward its rest sees them. Where it has saved what is overwritten, autograd raises in
backward, as in one process. Between passes the next forward sees them, also of replaced ``.data``.
Teachers have a file of their own.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call
from torch.optim import SGD

from vescale_fsdp import fully_shard, unsharded
from vescale_fsdp.optim import flatten_

from ..helpers import full_parameters
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
    in_settings,
    is_sharded,
    listed,
    named,
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


# By attributes, and by their ``.data``

ROWS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "released": {"reshard_after_forward": True},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "ddp": {"sharding": "ddp"},
}


class Decays(nn.Linear):
    """Writes to an attribute in each forward, also in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def compare(model: nn.Module, plain: nn.Module) -> None:
    for name, weight in full_parameters(model).items():
        torch.testing.assert_close(weight, plain.get_parameter(name).detach(), msg=name)


def write_to_attributes(options: dict[str, Any], recomputes: bool = False) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(Decays(4, 4), nn.Tanh(), Decays(4, 4))
        if recomputes:  # the forward, and its writes, come again in backward
            for part in model:
                recompute(part)
        return model

    plain, model = make(), make()
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        x = torch.full((2, 4), 1.0 + step)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                each(x)
        compare(model, plain)  # as an average of weights reads them
        with torch.no_grad():
            for each in (plain, model):
                for param in each.parameters():
                    param.mul_(1.5)  # between passes
                each(x)
        compare(model, plain)


class Normalized(nn.Linear):
    """Weights of length one, as of face recognition. So is the bias: each rank has some of it."""

    def forward(self, x: Tensor) -> Tensor:
        for param in (self.weight, self.bias):
            param.data.copy_(F.normalize(param.data, dim=-1))
        return super().forward(x)


class Assigned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        for param in (self.weight, self.bias):
            param.data = F.normalize(param.data, dim=-1)
        return super().forward(x)


class DecaysByParameters(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for param in self.parameters():
                param.mul_(0.5)
        return super().forward(x)


def write_to_data_of_attributes(options: dict[str, Any]) -> None:
    """The forward computes with it. Nothing tells of it, and it is lost, as with FSDP2."""
    torch.manual_seed(0)
    for layer_class in (Normalized, Assigned):
        plain = layer_class(4, 4)
        model = fully_shard(copy.deepcopy(plain), **options)
        before = full_parameters(model)
        x = torch.ones(2, 4)
        found = model(x)
        torch.testing.assert_close(found, plain(x))
        found.sum().backward()
        # Where nothing is sharded, a write in place is one to what the optimizer trains.
        if options == {"sharding": "ddp"} and layer_class is Normalized:
            compare(model, plain)
            continue
        for name, weight in full_parameters(model).items():
            assert torch.equal(weight, before[name]), "nothing tells of the write, and it is lost"


@patch.dict(os.environ, VESCALE_FSDP_CHECK_MEMORY="1")
def write_to_data_and_be_told(options: dict[str, Any]) -> None:
    """A mode that compares what is freed with what was gathered says so."""
    x = torch.ones(2, 4)
    for layer_class in (Normalized, Assigned):
        model = fully_shard(layer_class(4, 4), **options)
        with pytest.raises(RuntimeError, match="has written to the data of 'weight', 'bias'"):
            model(x).sum().backward()
    for layer_class in (nn.Linear, Decays, DecaysByParameters):
        model = fully_shard(layer_class(4, 4), **options)
        for _ in range(2):
            model(x).sum().backward()


# Between passes


def write_by_hand(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = fully_shard(copy.deepcopy(plain), **options)
    for each in (plain, model):
        with unsharded(each, writeback=True) if each is model else contextlib.nullcontext():
            for param in each[0].parameters():
                param.data = param.data * 0.5
            vector = nn.utils.parameters_to_vector(each[1].parameters())
            nn.utils.vector_to_parameters(vector.detach() + 1, each[1].parameters())
    compare(model, plain)
    refused = pytest.raises(RuntimeError, match=r"'1\.weight' was replaced by another one inside")
    with refused, unsharded(model, writeback=True):
        model[1].weight = nn.Parameter(torch.zeros(2, 4))
    compare(model, plain)
    refused = pytest.raises(RuntimeError, match=r"Linear got the parameters \['other'\]")
    with refused, unsharded(model, writeback=True):
        model[1].other = nn.Parameter(torch.zeros(2, 4))
    del model[1].other
    misfits = pytest.raises(ValueError, match=r"was given data of shape \(3,\)")
    with misfits, unsharded(model, writeback=True):
        model[1].bias.data = torch.zeros(3)


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5))


def average_of_two_models(kept: bool) -> None:
    """Averaged weights, as of a copy of the model, that the next forward must use."""
    torch.manual_seed(1)
    single, averaged = encoder(), encoder()
    torch.manual_seed(1)
    model, average = encoder(), encoder()
    options = {"reshard_after_forward": not kept}
    fully_shard(model, **options)
    for module in average:
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    fully_shard(average, **options)
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    for student, teacher in ((single, averaged), (model, average)):
        for _ in range(3):
            for p, ema_p in zip(student.parameters(), teacher.parameters(), strict=True):
                ema_p.data = ema_p.data * 0.75 + p.data * 0.25
            teacher(x)
    torch.testing.assert_close(average(x), averaged(x))


def swap_data(flattens: bool) -> None:
    """The weights of an average are used for an evaluation, as most classes for it do."""
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    for name in ("default", "zero1", "ddp", "kept"):
        outputs = []
        for shards in (False, True):
            torch.manual_seed(1)
            model, found = encoder(), list[Tensor]()
            if shards:
                for module in model:
                    if isinstance(module, nn.Linear):
                        fully_shard(module, **ROWS[name])
                fully_shard(model, **ROWS[name])
            optimizer = torch.optim.AdamW(model.parameters(), 0.1)
            if shards and flattens:
                flatten_(optimizer)
            average = [p.detach().clone() for p in model.parameters()]
            for step in range(4):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for each, p in zip(average, model.parameters(), strict=True):
                        each.lerp_(p, 0.1)
                backup = [p.data for p in model.parameters()]
                for each, p in zip(average, model.parameters(), strict=True):
                    p.data = each
                if step % 2:
                    with torch.no_grad():
                        found.append(model(x))
                for each, p in zip(backup, model.parameters(), strict=True):
                    p.data = each
            outputs.append([*found, model(x)])
        torch.testing.assert_close(*outputs, msg=lambda m, name=name: f"{name}: {m}")


WRITES_TO_ALL: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda model: [p.mul_(2) for p in model.parameters()],
    "data": lambda model: [p.data.mul_(2) for p in model.parameters()],
    "part of data": lambda model: [p.data[:].mul_(2) for p in model.parameters()],
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 2),
    "foreach of data": lambda model: torch._foreach_mul_([p.data for p in model.parameters()], 2),
}


def write_to_kept_weights() -> None:
    cases = product(WRITES_TO_ALL.items(), ({"reshard_after_forward": False}, {"sharding": "ddp"}))
    for (name, write), options in cases:
        torch.manual_seed(1)
        single = encoder().bfloat16()
        torch.manual_seed(1)
        model = fully_shard(encoder(), mp_policy=MixedPrecisionPolicy(torch.bfloat16), **options)
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            outputs = [single(x.bfloat16()), model(x)]
            torch.testing.assert_close(outputs[1], outputs[0], msg=lambda m, name=name: name + m)
            with torch.no_grad():
                write(single)
                write(model)


def assign_another_dtype() -> None:
    torch.manual_seed(1)
    single = encoder()
    torch.manual_seed(1)
    model = fully_shard(encoder())
    before = list(model.parameters())
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    for each in (single, model):
        each(x)
        for p in each.parameters():
            p.data = p.data.double() + 1
    torch.testing.assert_close(model(x.double()), single(x.double()))
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x.double()).sum().backward()
    optimizer.step()
    single(x.double()).sum().backward()
    torch.optim.SGD(single.parameters(), lr=1.0).step()
    torch.testing.assert_close(model(x.double()), single(x.double()))


def assign_what_does_not_fit() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    fully_shard(model[1])
    fully_shard(model)
    with pytest.raises(ValueError, match=r"the data of parameter 'weight' cannot be replaced"):
        model[1].weight.data = torch.zeros(5, 4)
    model(torch.zeros(1, 3))
    for module in (model, model.double()):  # also where the parameters got another memory
        module(torch.zeros(1, 3, dtype=module[0].weight.dtype))
        module.reshard()
        with pytest.raises(ValueError, match=r"parameter '1.weight' cannot be replaced") as caught:
            module[1].weight.data = torch.zeros(5, 4)
        assert "a Tensor of shape (5, 4); expected a DTensor of shape (5, 4)" in str(caught.value)
        with pytest.raises(ValueError, match=r"parameter '0.bias'.*shape \(3,\)"):
            module[0].bias.data = module[0].bias[0:3]


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
    found |= in_settings("AfterUse", check, make=lambda: Net(AfterUse), raises=CHANGED)
    for kind in (WithoutNoGrad, WithoutNoGradByAttribute):
        found |= in_settings(kind.__name__, check, make=kind, raises="leaf Variable")
    for ask in (
        write_to_attributes,
        write_to_data_of_attributes,
        write_to_data_and_be_told,
        write_by_hand,
    ):
        for name, options in ROWS.items():
            found[f"{ask.__name__}, {name}"] = Case(
                lambda ask=ask, options=options: ask(options),
                is_nightly=name == "released" and ask is not write_to_attributes,
            )
    for name in ("default", "kept"):
        found[f"write_to_attributes, {name}, recomputed"] = Case(
            lambda name=name: write_to_attributes(ROWS[name], recomputes=True)
        )
    for flag in (False, True):
        found[f"average_of_two_models, kept {flag}"] = Case(
            lambda flag=flag: average_of_two_models(flag)
        )
        found[f"swap_data, flat {flag}"] = Case(lambda flag=flag: swap_data(flag))
    for run in (write_to_kept_weights, assign_another_dtype, assign_what_does_not_fit):
        found[run.__name__] = Case(run)
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
