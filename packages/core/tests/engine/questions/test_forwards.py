"""What a forward may do with its parameters, and modules that make their weights of others."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, parametrize, prune

from vescale_fsdp import fully_shard

from ..helpers import full
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
    batch,
    in_settings,
    listed,
    named,
    pair,
    part,
    squares,
)

# Weights that are made of others


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.log.exp()


class Parametrized(Block):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.a, "weight", Scale())


class CachedParametrization(Parametrized):
    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().forward(x) + super().forward(x)


class Orthogonal(Block):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.orthogonal(self.a)


class WeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.a)


class OldWeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(self.a)


class Pruned(Block):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.a, "weight", 0.5)


# How a parameter is found


class Lists(Block):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.dict = nn.ParameterDict({"x": torch.randn(WIDTH), "y": torch.randn(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * sum(self.list) * self.list[0] + self.dict["x"] * self.dict.y
        return x + sum(self.dict.values()) + self.list[-1]


class OwnGetattr(Block):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("a").weight if name == "alias" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.alias


class Wrapper(nn.Module):
    """Attributes of what it is around are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Block(), nn.Parameter(torch.randn(WIDTH))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + self.a.bias


class OtherSlots(Block):
    __slots__ = ("cache",)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = x
        return super().forward(x)


class ByDict(Block):
    """As `torch.nn.utils` does, a parameter is read where it is registered."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.a._parameters["weight"])  # type: ignore[arg-type]


class Constants(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) + F.linear(x, self.a.weight.data)
        return x + F.linear(x, self.b.weight.detach())


class IsParameter(Block):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.a.weight, nn.Parameter)
        assert self.a.weight.requires_grad
        assert self.a.weight.shape == (WIDTH, WIDTH)
        return super().forward(x)


class Looks(Block):
    """Counts and names, of a state dict and of parameters, are those of the module."""

    def forward(self, x: Tensor) -> Tensor:
        assert list(self.state_dict()) == [name for name, _ in self.named_parameters()]
        assert sum(param.numel() for param in self.parameters()) == 2 * WIDTH * (WIDTH + 2)
        return super().forward(x)


class Converts(Block):
    """To what the parameters are already."""

    def forward(self, x: Tensor) -> Tensor:
        self.a.to(torch.float64)
        self.b.double()
        return super().forward(x)


class Recurses(Block):
    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        y = super().forward(x)
        return self(y, depth - 1) if depth else y


class Clears(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad()
        return super().forward(x)


# Penalties, computed inside of a forward


class PenaltyOnParameters(Block):
    penalty: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = sum(param.square().sum() for param in self.parameters())  # type: ignore[assignment]
        return super().forward(x)


class PenaltyOnAttributes(Block):
    penalty: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.a.weight.square().sum() + self.b.bias.square().sum()
        return super().forward(x)


class ReturnsPenalty(Block):
    def forward(self, x: Tensor) -> Tensor:
        penalty = self.a.weight.square().sum() + self.b.bias.square().sum()
        return super().forward(x) + 0.1 * penalty


def with_penalty(model: Any, x: Tensor) -> None:
    loss = squares(model, x)
    (loss + 0.1 * sum(block.penalty for block in model.blocks)).backward()


# Changes of what is registered, while a forward runs


class DeletesUnused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.temporary = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if "temporary" in self._parameters:
            del self.temporary
        assert not hasattr(self, "temporary")
        return super().forward(x)


class SetsToNone(Block):
    def __init__(self) -> None:
        super().__init__()
        self.temporary = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.temporary = None  # type: ignore[assignment]
        assert self.temporary is None
        return super().forward(x)


class SetsATensor(Block):
    """nn.Module refuses it."""

    def forward(self, x: Tensor) -> Tensor:
        with pytest.raises(TypeError, match="cannot assign"):
            self.a.weight = torch.ones(2, 2)  # type: ignore[assignment]
        return super().forward(x)


class SetsAParameter(Block):
    """It would not be the unit's: neither sharded nor reduced."""

    def forward(self, x: Tensor) -> Tensor:
        self.a.bias = nn.Parameter(self.a.bias.detach().clone())
        return super().forward(x)


class FreezesForAWhile(Block):
    """Its weights are constants in this forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.a.requires_grad_(False)
        y = super().forward(x)
        self.a.requires_grad_(True)
        return y


class FreezesByAttribute(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.requires_grad_(False)
        return super().forward(x)


class HooksInForward(Block):
    """A hook of the first step is there in the second, too."""

    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.register_hook(lambda gradient: gradient * 2)
        return super().forward(x)


class Copies(Block):
    copied: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["copied"] = copy.deepcopy(self.a)
        return super().forward(x)


class Pickles(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch.save(self.a, io.BytesIO())
        return super().forward(x)


KINDS: list[type[nn.Module]] = [
    Parametrized,
    CachedParametrization,
    Orthogonal,
    WeightNorm,
    OldWeightNorm,
    Pruned,
    Lists,
    OwnGetattr,
    Wrapper,
    OtherSlots,
    Constants,
    IsParameter,
    Looks,
    Converts,
    Recurses,
    Clears,
    ReturnsPenalty,
    DeletesUnused,
    SetsToNone,
    SetsATensor,
]


def refused(block: type[nn.Module], match: str) -> None:
    """A forward is an error, also where one process allows it."""
    _, model = pair(lambda: Net(block))
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=match):
        squares(model, part(batch(0))).backward()


# What ENGINE.md leaves to be decided: each case is one answer


class ClassAttribute(Block):
    """Where it was `None` for all instances, as in older models."""

    scale: ClassVar[Any] = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._parameters["scale"] = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Property(Block):
    def __init__(self) -> None:
        super().__init__()
        self._parameters["scale"] = nn.Parameter(torch.ones(WIDTH))

    @property
    def scale(self) -> Any:
        return self._parameters["scale"]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Slots(Block):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def refused_by_fully_shard(block: Callable[[], nn.Module], words: str = "'.*scale'") -> None:
    """Each has something by the parameter's name that Python finds before ``__dict__``."""
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        pair(lambda: Net(block))


class ScriptedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, by another category in each version
            self.layer = torch.jit.script(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class ReadsDtype(nn.Module):
    """As models of transformers do: ``self.dtype`` is that of the first parameter."""

    def __init__(self, seen: list[torch.dtype]) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(WIDTH, WIDTH), seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(next(self.parameters()).dtype)
        return self.layer(x)


def dtype_in_a_forward() -> None:
    """The one that the forward computes in, as with FSDP2."""
    seen: list[torch.dtype] = []
    model = nn.Sequential(ReadsDtype(seen), ReadsDtype(seen))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
    assert seen == [torch.bfloat16] * 4


class ReadsGradient(Block):
    """Of its own weight by attribute."""

    seen: ClassVar[list[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.a.weight.grad)
        return super().forward(x)


def gradient_in_a_forward() -> None:
    """It is None, and torch warns: the view that is seen is no leaf."""
    _, model = pair(lambda: Net(ReadsGradient))
    with warnings.catch_warnings(action="ignore"):
        squares(model, part(batch(0))).backward()
    ReadsGradient.seen.clear()
    with pytest.warns(UserWarning, match="The .grad attribute of a Tensor that is not a leaf"):
        squares(model, part(batch(1)))
    assert ReadsGradient.seen == [None] * 3


class SeesRegistered(Block):
    seen: ClassVar[list[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.a._parameters["weight"])
        return super().forward(x)


def registered_in_a_forward() -> None:
    """It is the shard."""
    _, model = pair(lambda: Net(SeesRegistered))
    SeesRegistered.seen.clear()
    squares(model, part(batch(0))).backward()
    assert all(isinstance(each, DTensor) for each in SeesRegistered.seen)


class FreezesAndStays(Block):
    """Through the module, for the forwards that follow."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.a.requires_grad_(False)
        return y


def frozen_from_the_next_forward_on() -> None:
    plain, model = pair(lambda: Net(FreezesAndStays))
    for step in range(2):
        for each, x in ((plain, batch(step)), (model, part(batch(step)))):
            each.zero_grad()
            squares(each, x).backward()
    for name, param in plain.named_parameters():
        found = model.get_parameter(name)
        assert found.requires_grad == param.requires_grad, name
        assert (found.grad is None) == (param.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(full(found.grad), param.grad, msg=name)


def cases() -> Cases:
    found: Cases = {}
    for kind in KINDS:
        make = lambda kind=kind: Net(kind)  # noqa: E731
        found |= in_settings(kind.__name__, as_one_process, make=make, steps=3)
    for kind in (PenaltyOnParameters, PenaltyOnAttributes, FreezesForAWhile, HooksInForward):
        make = lambda kind=kind: Net(kind)  # noqa: E731
        run = {"run": with_penalty} if "Penalty" in kind.__name__ else {}
        found |= in_settings(kind.__name__, as_one_process, make=make, **run)
    found["Copies"] = Case(lambda: refused(Copies, "cop"))
    found["Pickles"] = Case(lambda: refused(Pickles, "pickle|copy|sharded"))
    found["SetsAParameter"] = Case(lambda: refused(SetsAParameter, "bias"))
    found["FreezesByAttribute"] = Case(lambda: refused(FreezesByAttribute, "requires_grad"))
    for kind in (ClassAttribute, Property, Slots):
        found[kind.__name__] = Case(lambda kind=kind: refused_by_fully_shard(kind))
    found["ScriptedPart"] = Case(lambda: refused_by_fully_shard(ScriptedPart, "torch.jit"))
    found["dtype"] = Case(dtype_in_a_forward)
    found["gradient"] = Case(gradient_in_a_forward)
    found["registered"] = Case(registered_in_a_forward)
    found["FreezesAndStays"] = Case(frozen_from_the_next_forward_on)
    return found


VIEW = "an attribute is the view of this forward, no leaf: "
OTHERWISE = {
    "Converts*": "a part is converted in a forward: torch exchanges shards that are in the graph",
    "FreezesForAWhile*": "a flag that is set by parameters() counts from the next forward on",
    "HooksInForward*": VIEW + "a hook on it is one of this forward",
    "dtype": "parameters() are shards, in their own dtype",
}
CASES = listed(cases(), OTHERWISE)


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.parametrize("name", named(CASES))
def test_forwards_do_what_they_do_in_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
