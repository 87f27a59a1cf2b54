"""Other divisions of a model: neighbouring units joined to larger ones, or large ones split.

A collective has a latency, and a unit a cost on the processor, whatever its size. If blocks are
tiny, units of several blocks have fewer of both::

    units of 1     block 0 | block 1 | block 2 | block 3 | block 4      10 all-gathers in a step
    units of 2     block 0, block 1  | block 2, block 3  | block 4       6

If a block is huge, two of them unsharded, with gradients, may be more than a rank has::

    layer          attention, expert 0, expert 1, .. expert 255
    its parts      attention, experts 0-62 | experts 63-126 | experts 127-190 | experts 191-255
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from vescale_fsdp_tune.costs.model import Dtype, Group, Model, Tensor, make_model
from vescale_fsdp_tune.costs.problem import BlockTimes, Division
from vescale_fsdp_tune.costs.traces import merged_trace, runs_in_order


def grouped(division: Division, size: int) -> Division | None:
    """Return the division with ``size`` neighbouring units as one. None: it cannot be.

    Units must run once, in order of definition, if there are traces.
    """
    if not all(runs_in_order(trace) for trace in division.traces.values()):
        return None
    model = division.model
    numbers = range(1, len(model.order))
    runs = [(0,), *(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))]
    merged: list[tuple[str, tuple[Group, ...]]] = []
    times: list[BlockTimes] = []
    shift: list[list[int]] = []  # of each unit's groups
    unit_of: list[int] = []
    for new, run in enumerate(runs):
        members = [model.units[model.order[number]].groups for number in run]
        names = [name for number in run for name in model.modules[number]]
        groups, places = _joined_groups(members, names if len(run) > 1 else [])
        merged.append((names[0] if names else "", groups))
        shift += places
        unit_of += [new] * len(run)
        each = [division.times[model.order[number]] for number in run]
        times.append(BlockTimes.total(each))
    (_, root), *others = merged
    made = make_model(model.name, root, others)
    modules = tuple(tuple(m for number in run for m in model.modules[number]) for run in runs)
    made = replace(_titled(made, modules), module=model.module)
    traces = {mode: merged_trace(trace, unit_of, shift) for mode, trace in division.traces.items()}
    return Division(made, _means(made, times), traces)


def split(division: Division, most_elements: int) -> Division | None:
    """Return the division with units of at most ``most_elements``, where modules allow it.

    Parts of a unit are its children in order of definition, several neighbours together up to
    that size; a larger child is divided into its own children. Times are shared by elements. None:
    no unit is larger, or there are traces, which do not say what happens within a unit, or the
    model is code: then its modules are known, and not every name is that of one with a forward.
    """
    model = division.model
    if (
        model.module is not None
        or division.traces
        or all(_numel(u.groups) <= most_elements for u in model.units[1:])
    ):
        return None
    others: list[tuple[str, tuple[Group, ...]]] = []
    times: list[BlockTimes] = [division.times[0]]
    modules: list[tuple[str, ...]] = [()]
    for index, names in zip(model.order[1:], model.modules[1:], strict=True):
        unit, whole = model.units[index], division.times[index]
        if len(unit.groups) != 1 or len(names) != 1 or _numel(unit.groups) <= most_elements:
            parts = [(names, unit.groups)]
        else:
            parts = [
                (tuple(f"{names[0]}.{child}" for child in children), (part,))
                for children, part in _parts(unit.groups[0], most_elements)
            ]
        for members, groups in parts:
            share = _numel(groups) / max(_numel(unit.groups), 1)
            others.append((members[0], groups))
            times.append(whole.times(share))
            modules.append(members)
    made = make_model(model.name, model.units[0].groups, others)
    made = replace(_titled(made, tuple(modules)), module=model.module)
    return Division(made, _means(made, times))


def _means(model: Model, times: Sequence[BlockTimes]) -> tuple[BlockTimes, ...]:
    """Return the mean times of each different unit, from those of each."""
    by_unit: dict[int, list[BlockTimes]] = {}
    for index, each in zip(model.order, times, strict=True):
        by_unit.setdefault(index, []).append(each)
    return tuple(BlockTimes.mean(by_unit[index]) for index in range(len(model.units)))


def _numel(groups: Sequence[Group]) -> int:
    return sum(group.numel for group in groups)


def _parts(group: Group, most_elements: int) -> list[tuple[list[str], Group]]:
    """Return the parts of a unit's group, each with the names of its modules in the unit."""
    found: list[tuple[list[str], list[Tensor]]] = []
    size = 0
    for name, tensors in _children(group.tensors, 1, most_elements):
        numel = sum(tensor.numel for tensor in tensors)
        if found and size + numel <= most_elements:
            found[-1][0].append(name)
            found[-1][1].extend(tensors)
            size += numel
        else:
            found.append(([name], [*tensors]))
            size = numel
    return [(names, replace(group, tensors=tuple(tensors))) for names, tensors in found]


def _children(
    tensors: Sequence[Tensor], depth: int, most_elements: int
) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Yield modules by ``depth`` parts of their names, and the children of those that are large."""
    for name, members in groupby(tensors, lambda each: _module(each.name, depth)):
        own = list(members)
        is_large = sum(tensor.numel for tensor in own) > most_elements
        if is_large and any(_module(each.name, depth + 1) != name for each in own):
            yield from _children(own, depth + 1, most_elements)
        else:
            yield name, own


def _module(name: str, depth: int) -> str:
    """Return the first parts of the name of a tensor's module: ``mlp`` of ``mlp.up.weight``."""
    return ".".join(name.split(".")[:-1][:depth]) or name


def _joined_groups(
    members: Sequence[tuple[Group, ...]], names: Sequence[str]
) -> tuple[tuple[Group, ...], list[list[int]]]:
    """Return the groups of a unit of several, and the new place of each old one.

    Names of tensors begin with the place of their unit, so that they differ.
    """
    found: dict[tuple[Dtype, bool], list[Tensor]] = {}
    places: list[list[int]] = []
    for number, groups in enumerate(members):
        places.append([])
        for group in groups:
            key = group.dtype, group.trainable
            tensors = found.setdefault(key, [])
            for tensor in group.tensors:
                name = f"{number}.{tensor.name}" if names else tensor.name
                tensors.append(replace(tensor, name=name))
            places[-1].append([*found].index(key))
    return tuple(Group(tuple(tensors), *key) for key, tensors in found.items()), places


def _titled(model: Model, modules: tuple[tuple[str, ...], ...]) -> Model:
    """Name units by their first and last module: ``blocks.0-1 to blocks.10-11``."""
    titles: dict[int, str] = {}
    for index, names in zip(model.order, modules, strict=True):
        if len(names) > 1:
            first = titles.get(index, _span(names)).partition(" to ")[0]
            last = _span(names)
            titles[index] = first if first == last else f"{first} to {last}"
    units = tuple(replace(u, title=titles.get(i, u.title)) for i, u in enumerate(model.units))
    return replace(model, units=units, modules=modules)


def _span(names: Sequence[str]) -> str:
    """Return ``blocks.0-3`` for ``blocks.0`` to ``blocks.3``."""
    first, last = re.split(r"(\d+)", names[0]), re.split(r"(\d+)", names[-1])
    differ = [k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b]
    if len(first) == len(last) and len(differ) == 1 and differ[0] % 2:
        k = differ[0]
        return "".join([*first[:k], f"{first[k]}-{last[k]}", *first[k + 1 :]])
    return f"{names[0]} and {len(names) - 1} more"
