"""Describes a model for a plan: units, their groups, and the tensors in them. No torch, no data.

A unit has the parameters of one call of ``fully_shard``. A group has the tensors of a unit that
share a buffer (one dtype, all trainable or all frozen). Equal units are stored once::

    units   (root, model.layers.0-2, model.layers.3-60)       the different units
    order   (0, 1, 1, 1, 2, 2, ..., 2)                        indices of units, in forward order
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Dtype:
    """A dtype, without torch."""

    name: str  # torch's, such as "bfloat16"
    itemsize: int
    floating: bool = True


BF16, FP32 = Dtype("bfloat16", 2), Dtype("float32", 4)
DTYPES = {  # by short name
    "fp64": Dtype("float64", 8),
    "fp32": FP32,
    "bf16": BF16,
    "fp16": Dtype("float16", 2),
}


@dataclass(frozen=True)
class Tensor:
    """A parameter: its name within the unit, and its full shape."""

    name: str
    shape: tuple[int, ...]
    is_hidden: bool = False  # a matrix of a hidden layer; not an embedding, head, norm, convolution

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether at least two dimensions have more than one element."""
        return sum(extent > 1 for extent in self.shape) > 1


@dataclass(frozen=True)
class Group:
    """The tensors of one unit that share a buffer."""

    tensors: tuple[Tensor, ...]
    dtype: Dtype  # of the shards
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True)
class Unit:
    """One or several equal units of a model."""

    title: str  # the modules' names, such as "model.layers.0-31"
    groups: tuple[Group, ...]  # none in a root whose parameters are all in other units
    is_root: bool
    count: int

    def title_of(self, group: Group) -> str:
        """Return the group's name in tables and pictures."""
        if len(self.groups) == 1:
            return self.title
        return f"{self.title}, {group.dtype.name}{'' if group.trainable else ', frozen'}"


class Event(Enum):
    """What happens at a moment of a step."""

    FORWARD = auto()  # a unit's forward begins
    END_OF_FORWARD = auto()
    BACKWARD = auto()  # the gradients of a unit's outputs are there
    GRADIENT = auto()  # the gradient of a parameter is there
    END_OF_BACKWARD = auto()  # the gradients of a unit's inputs are there
    END = auto()  # of the step


@dataclass(frozen=True)
class Moment:
    """An event of a step, and the bytes of activations from the moment before until it."""

    event: Event
    highest_bytes: int  # the most since the moment before
    live_bytes: int  # at this moment; a parameter's gradient is no longer in it
    unit: int = 0  # index in the order of the model
    call: int = 0  # which forward of the step it belongs to
    takes_gradients: bool = False  # at the end of a forward: whether an input wants a gradient
    is_reachable: bool = False  # the same: whether a backward can reach an output
    group: int = 0  # of a gradient: index of its group in the unit
    num_elements: int = 0  # of a gradient


@dataclass(frozen=True)
class Trace:
    """A step as the model's code runs it."""

    moments: tuple[Moment, ...]
    host_bytes: int = 0  # the most activations in host memory, if they are offloaded

    @property
    def highest_bytes(self) -> int:
        """The most activations at any moment."""
        return max(moment.highest_bytes for moment in self.moments)


@dataclass(frozen=True)
class Model:
    """The units of a model and their order."""

    name: str
    units: tuple[Unit, ...]  # the different units, in order of first appearance; the root first
    order: tuple[int, ...]  # indices into units, in the order in which forward runs them
    modules: tuple[tuple[str, ...], ...] = ()  # names of those of each; none of the root
    trace: Trace | None = None  # of a step, with activations; None: not run
    module: Any = field(default=None, compare=False)  # on the meta device; None: of a shapes file

    @property
    def num_units(self) -> int:
        """Number of units that have parameters of their own."""
        return sum(unit.count for unit in self.units if unit.groups)

    @property
    def num_parameters(self) -> int:
        """Number of elements of all tensors of all units."""
        return sum(unit.count * sum(group.numel for group in unit.groups) for unit in self.units)


def make_model(
    name: str, root: Sequence[Group], others: Iterable[tuple[str, Sequence[Group]]]
) -> Model:
    """Make a model; equal units are stored once.

    Args:
        name: the model's name.
        root: groups of the root; may be empty.
        others: name and groups of each other unit, in forward order.
    """
    keyed = [(unit_name, tuple(groups)) for unit_name, groups in others]
    names: dict[tuple[Group, ...], list[str]] = {}
    for unit_name, key in keyed:
        names.setdefault(key, []).append(unit_name)
    units = [Unit("root", tuple(root), is_root=True, count=1)]
    units += [
        Unit(joined(members), groups, is_root=False, count=len(members))
        for groups, members in names.items()
    ]
    index = {key: 1 + i for i, key in enumerate(names)}
    order = (0, *(index[key] for _, key in keyed))
    modules = ((), *((unit_name,) for unit_name, _ in keyed))
    return Model(name, tuple(units), order, modules)


def joined(names: Sequence[str]) -> str:
    """Join names: ``h.0-2,5`` for ``h.0``, ``h.1``, ``h.2`` and ``h.5``.

    If they differ in more than one number, or have more than three gaps, the result is the first
    name and the number of the others.
    """
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1:
        return distinct[0]
    parts = [re.split(r"(\d+)", name) for name in distinct]
    varying = {
        k
        for one in parts
        for k, (mine, first) in enumerate(zip(one, parts[0], strict=False))
        if mine != first
    }
    if len({len(one) for one in parts}) == 1 and len(varying) == 1 and min(varying) % 2:
        k = varying.pop()
        runs = _runs([int(one[k]) for one in parts])
        if len(runs) <= 3:
            return "".join([*parts[0][:k], ",".join(runs), *parts[0][k + 1 :]])
    return f"{distinct[0]} and {len(distinct) - 1} more"


def kinds(names: Iterable[str]) -> list[str]:
    """Replace the numbers in each name by ``*``: ``experts.7.up`` becomes ``experts.*.up``."""
    return [re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names]


def _runs(numbers: Sequence[int]) -> list[str]:
    """Return the ranges of sorted numbers: ``["0-2", "5"]`` for ``[0, 1, 2, 5]``."""
    found = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        found.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return found
