"""Other divisions of a model: neighbouring units joined to larger ones.

A collective has a latency, and a unit a cost on the processor, whatever its size. If blocks are
tiny, units of several blocks have fewer of both::

    units of 1     block 0 | block 1 | block 2 | block 3 | block 4      10 all-gathers in a step
    units of 2     block 0, block 1  | block 2, block 3  | block 4       6
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from vescale_fsdp.costs.model import Dtype, Group, Model, Tensor, make_model
from vescale_fsdp.costs.problem import BlockTimes, Division
from vescale_fsdp.costs.traces import merged_trace, runs_in_order


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
        times.append(BlockTimes(sum(t.forward_s for t in each), sum(t.backward_s for t in each)))
    (_, root), *others = merged
    # Units whose times differ are different, though their groups are the same.
    made = make_model(model.name, root, others)
    modules = tuple(tuple(m for number in run for m in model.modules[number]) for run in runs)
    made = replace(_titled(made, modules), module=model.module)
    by_unit: dict[int, list[BlockTimes]] = {}
    for index, each_time in zip(made.order, times, strict=True):
        by_unit.setdefault(index, []).append(each_time)
    means = tuple(
        BlockTimes(
            sum(t.forward_s for t in by_unit[i]) / len(by_unit[i]),
            sum(t.backward_s for t in by_unit[i]) / len(by_unit[i]),
        )
        for i in range(len(made.units))
    )
    traces = {mode: merged_trace(trace, unit_of, shift) for mode, trace in division.traces.items()}
    return Division(made, means, traces)


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
