"""Models whose units take and return what is hard on the boundary of a unit.

In each, ``model.units`` lists the modules to shard below the root, and ``model(x)`` is a tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 5


@dataclass
class Output:
    hidden: Tensor
    extra: Tensor
    label: str = "kept"


@dataclass(frozen=True)
class FrozenOutput:
    hidden: Tensor
    extra: Tensor
    label: str = "kept"


class Pair(NamedTuple):
    hidden: Tensor
    extra: Tensor


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """A dataclass that is a dict too, filled on creation, as Transformers has them."""

    hidden: Tensor | None = None
    extra: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            self[field.name] = getattr(self, field.name)


def as_dict(hidden: Tensor, extra: Tensor) -> Any:
    return {"hidden": hidden, "extra": extra, "label": "kept", "nothing": None}


def as_ordered_dict(hidden: Tensor, extra: Tensor) -> Any:
    return OrderedDict(hidden=hidden, extra=extra)


def as_tuple(hidden: Tensor, extra: Tensor) -> Any:
    return hidden, extra


def as_list(hidden: Tensor, extra: Tensor) -> Any:
    return [hidden, extra]


def as_nested(hidden: Tensor, extra: Tensor) -> Any:
    return {"outer": [Output(hidden, extra), ("text", Pair(hidden, extra))], "count": 3}


def read(output: Any) -> tuple[Tensor, Tensor]:
    """``hidden`` and ``extra`` of any of these outputs."""
    if isinstance(output, (tuple, list)):
        return output[0], output[1]
    if isinstance(output, dict) and "outer" in output:
        first, (_, pair) = output["outer"]
        return first.hidden + pair.hidden, pair.extra
    if isinstance(output, dict):
        return output["hidden"], output["extra"]
    return output.hidden, output.extra


OUTPUTS = {
    "dict": (as_dict, dict),
    "ordered_dict": (as_ordered_dict, OrderedDict),
    "dataclass": (Output, Output),
    "frozen_dataclass": (FrozenOutput, FrozenOutput),
    "model_output": (ModelOutput, ModelOutput),
    "tuple": (as_tuple, tuple),
    "list": (as_list, list),
    "namedtuple": (Pair, Pair),
    "nested": (as_nested, dict),
}


class OutputUnit(nn.Module):
    """One linear layer for each of two tensors of an output of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return OUTPUTS[self.kind][0](self.first(x), self.second(x))


class OutputModel(nn.Module):
    """Two such units; the first one's ``extra`` goes around the second."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.units = nn.ModuleList([OutputUnit(kind), OutputUnit(kind)])

    def forward(self, x: Tensor) -> Tensor:
        first = self.units[0](x)
        second = self.units[1](torch.tanh(read(first)[0]))
        for output in (first, second):
            assert type(output) is OUTPUTS[self.units[0].kind][1], f"got {type(output)}"
        hidden, extra = read(second)
        return hidden * 2 + extra.square() + read(first)[1]


class OnlyExtra(OutputModel):
    """Uses one of the two outputs only, and so half of the parameters of each unit."""

    def forward(self, x: Tensor) -> Tensor:
        return read(self.units[1](read(self.units[0](x))[1]))[1]


class Linear(nn.Module):
    """A unit of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Units(nn.Module):
    """Base of the models below: three linear units and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Linear() for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(WIDTH))


class CalledTwice(Units):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.units[0](x))
        x = torch.tanh(self.units[1](x))
        return self.units[2](self.units[1](x)) * self.scale


class CalledAgainAtTheEnd(Units):
    """The first unit is used once more after all others."""

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 2, 0):
            x = torch.tanh(self.units[index](x))
        return x * self.scale


class Skipping(Units):
    def forward(self, x: Tensor) -> Tensor:
        return self.units[2](torch.tanh(self.units[0](x))) * self.scale


class Backwards(Units):
    """Runs its units against the order of registration."""

    def forward(self, x: Tensor) -> Tensor:
        for unit in reversed(self.units):
            x = torch.tanh(unit(x))
        return x * self.scale


class InPlaceOnOutput(Units):
    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
            x.mul_(2)
            F.relu_(x)
        return x * self.scale


class ViewUnit(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).t()


class InPlaceOnView(Units):
    """The units return views; FSDP2 warns of this, for its hooks would be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([ViewUnit(), ViewUnit()])

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
            x.mul_(2)
            x = x.t()
        return x * self.scale


class InPlaceOnTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([OutputUnit("tuple"), OutputUnit("tuple")])

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            hidden, extra = unit(x)
            hidden.add_(1)
            extra.mul_(hidden)
            x = extra
        return x


class KeywordUnit(Linear):
    def forward(self, x: Tensor, *, gate: Tensor, factors: dict[str, Any]) -> Tensor:
        return self.inner(x) * gate * factors["tensor"][0] * factors["number"]


class Keywords(Units):
    """The second unit gets what needs a gradient by keyword only."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Linear(), KeywordUnit()])

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.tanh(self.units[0](x))
        constant = x.detach()
        return self.units[1](constant, gate=gate, factors={"tensor": [gate + 1], "number": 3})


class PassThroughUnit(Linear):
    """Returns its input untouched beside its result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.inner(x)


class PassThrough(Units):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([PassThroughUnit(), PassThroughUnit()])

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            same, new = unit(x)
            x = same + torch.tanh(new)
        return x * self.scale


class NoGradientInside(Units):
    """One unit runs without gradients, as a teacher or a frozen tower would."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.units[1](x)
        return self.units[2](torch.tanh(self.units[0](x))) * target * self.scale


class EmbeddingFirst(nn.Module):
    """The first unit has an input of integers: no gradient ever leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([nn.Embedding(7, WIDTH), Linear()])

    def forward(self, x: Tensor) -> Tensor:
        return self.units[1](self.units[0]((x * 3).long() % 7))


class NestedUnits(nn.Module):
    """Units inside units: the outer one has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = CalledTwice()
        self.last = Linear()

    @property
    def units(self) -> list[nn.Module]:
        return [*self.outer.units, self.outer, self.last]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.outer(x)))
