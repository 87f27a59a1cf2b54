"""Models on which sharded data parallelism is known to go wrong.

In each, ``model.units`` lists the modules to shard below the root.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import boundary_models as boundary
from .models import MLP, Branches, OddParameters


class Chain(MLP):
    """Three layers, each of them a unit."""

    @property
    def units(self) -> Iterable[nn.Module]:
        return self.layers


# Units that are used on some ranks only


class SkippedOnOneRank(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        if dist.get_rank() == 0:
            x = torch.tanh(self.layers[1](x))
        return self.layers[2](x)


class AnotherOnEachRank(boundary.Units):
    """Units of equal shape, of which each rank uses its own, like experts."""

    def forward(self, x: Tensor) -> Tensor:
        return self.units[dist.get_rank()](torch.tanh(self.units[2](x))) * self.scale


class NoGradientOnOneRank(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        with torch.set_grad_enabled(dist.get_rank() == 0):
            gate = self.layers[1](x)
        return self.layers[2](x) * gate


class AnotherOrderOnEachRank(boundary.Units):
    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 2) if dist.get_rank() == 0 else (0, 2, 1):
            x = torch.tanh(self.units[index](x))
        return x * self.scale


class Parameters(Branches):
    """One unit, of which each rank uses the parameters that ``names_by_rank`` says."""

    units = ()

    def __init__(self, names_by_rank: list[list[str]]) -> None:
        super().__init__()
        self.names_by_rank = names_by_rank

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :4], *self.names_by_rank[dist.get_rank()])


# What the root returns


@dataclass
class HubOutput(OrderedDict[str, Any]):
    """A dataclass that is a dictionary too and keeps both alike, as Transformers' ModelOutput."""

    hidden: Tensor | None = None
    extra: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Opaque:
    """An output that is no container anyone knows."""

    def __init__(self, hidden: Tensor, extra: Tensor) -> None:
        self.hidden, self.extra = hidden, extra


OUTPUTS: dict[str, Callable[..., Any]] = {
    "dict": boundary.as_dict,
    "dataclass": boundary.Output,
    "model_output": HubOutput,
    "opaque": Opaque,
}


class Root(nn.Module):
    """Returns two tensors of which one is read; its layers are units, or all its own."""

    def __init__(self, kind: str, has_units: bool) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.units: list[nn.Module] = [*self.layers] if has_units else []
        self.last = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return OUTPUTS[self.kind](self.last(x), 2 * x)


class ReadsAttributes(nn.Module):
    """Its units return a dataclass that is a dictionary too and does not keep both alike."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([boundary.OutputUnit("model_output") for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            output = unit(x)
            x = torch.tanh(output.hidden)
        return x


# Which parameters a unit may have


class Tied(boundary.Units):
    """The first and the last unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.units[2].inner.weight = self.units[0].inner.weight

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x * self.scale


class TwoDtypes(nn.Module):
    units = ()

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.wide


class Convolutions(nn.Module):
    """Parameters of one to five dimensions."""

    units = ()

    def __init__(self) -> None:
        super().__init__()
        self.in_1d = nn.Conv1d(1, 3, 3, padding=1)
        self.in_2d = nn.Conv2d(3, 3, (1, 3), padding=(0, 1))
        self.in_3d = nn.Conv3d(3, 2, (1, 1, 3), padding=(0, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.in_1d(x[:, None]))
        x = torch.tanh(self.in_2d(x[:, :, None]))
        return self.in_3d(x[:, :, None])


class ChannelsLast(nn.Module):
    units = ()

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(5, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, :, None, None].expand(-1, -1, 2, 2))


class Scalar(nn.Module):
    units = ()

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Odd(OddParameters):
    """A scalar, a transposed matrix and two dtypes in one unit."""

    units = ()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :3])


# Ranks that differ


class AnotherWidthOnEachRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = 6 + dist.get_rank()
        self.units = nn.ModuleList([nn.Linear(5, width), nn.Linear(width, 5)])

    def forward(self, x: Tensor) -> Tensor:
        return self.units[1](self.units[0](x))


class AnotherDepthOnEachRank(Chain):
    def __init__(self) -> None:
        super().__init__(2 + dist.get_rank())
