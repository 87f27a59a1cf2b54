"""Makes a failing case smaller, as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .cases import CONTAINERS, Case, Node, Step, Unit, walk

__all__ = ["minimised"]


def minimised(case: Case, fails: Callable[[Case], bool], limit_s: float) -> Case:
    """The smallest case found in that time for which ``fails`` holds, as it does for ``case``.

    Greedy: the first smaller case that still fails is taken, and all is tried again.
    """
    deadline = time.monotonic() + limit_s
    tried = {case}
    again = True
    while again:
        again = False
        for smaller in _smaller(case):
            if time.monotonic() > deadline:
                return case
            if smaller in tried:
                continue
            tried.add(smaller)
            if fails(smaller):
                case, again = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, what takes most away first."""
    yield from _fewer_steps(case)
    yield from _without_a_feature(case)
    yield from (_kept(replace(case, root=root)) for root in _smaller_trees(case.root))
    yield from (replace(case, steps=steps) for steps in _simpler_steps(case.steps))
    yield from _defaults(case, ("root", "steps", "width"))
    for width in (1, 2):
        if width < case.width:
            yield replace(case, width=width)


def _fewer_steps(case: Case) -> Iterator[Case]:
    for i in range(len(case.steps)):
        if len(case.steps) > 1:
            yield replace(case, steps=case.steps[:i] + case.steps[i + 1 :])


def _without_a_feature(case: Case) -> Iterator[Case]:
    """One feature less, everywhere at once."""
    for each in fields(Step):
        steps = tuple(replace(step, **{each.name: each.default}) for step in case.steps)
        yield replace(case, steps=steps)
    for each in fields(Node):
        if each.name not in ("name", "kind", "children", "output"):
            change = {each.name: each.default}
            yield replace(case, root=_everywhere(case.root, lambda n, c=change: replace(n, **c)))
    options = {"joins": False, "reshard": "None", "granularity": "None", "dtype": ""}
    for name, value in options.items():
        change = {name: value}
        yield replace(case, root=_everywhere(case.root, lambda n, c=change: _with_unit(n, c)))


def _everywhere(node: Node, change: Callable[[Node], Node], *, is_root: bool = True) -> Node:
    children = tuple(_everywhere(child, change, is_root=False) for child in node.children)
    changed = replace(change(node), children=children)
    return replace(changed, unit=node.unit) if is_root and changed.unit is None else changed


def _with_unit(node: Node, change: dict[str, Any]) -> Node:
    return node if node.unit is None else replace(node, unit=replace(node.unit, **change))


def _simpler_steps(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    for i, step in enumerate(steps):
        simpler = list(_defaults(step, ()))
        for name in ("before", "passes"):
            values = getattr(step, name)
            shorter = (values[:j] + values[j + 1 :] for j in range(len(values)))
            simpler += [replace(step, **{name: v}) for v in shorter if v or name == "before"]
        for j, kind in enumerate(step.passes):
            if kind != "plain":
                passes = (*step.passes[:j], "plain", *step.passes[j + 1 :])
                simpler.append(replace(step, passes=passes))
        yield from ((*steps[:i], each, *steps[i + 1 :]) for each in simpler)


def _smaller_trees(node: Node, *, is_root: bool = True) -> Iterator[Node]:
    for i, child in enumerate(node.children):
        rest = node.children[:i], node.children[i + 1 :]
        if len(node.children) > 1:
            yield replace(node, children=rest[0] + rest[1])
        if child.children:  # without the layer in between
            yield replace(node, children=rest[0] + child.children + rest[1])
    for i, child in enumerate(node.children):
        for smaller in _smaller_trees(child, is_root=False):
            yield replace(node, children=(*node.children[:i], smaller, *node.children[i + 1 :]))
    fixed = ("name", "kind", "children", *(("unit", "output") if node.kind == "Heads" else ()))
    yield from _defaults(node, (*fixed, "unit") if is_root else fixed)
    if node.unit is not None:
        for unit in _defaults(node.unit, ()):
            yield replace(node, unit=unit)
    if node.kind == "Residual":
        yield replace(node, kind="Chain")
    if node.kind not in (*CONTAINERS, "Linear", "Tanh"):
        yield replace(node, kind="Linear", output="tensor", extra="")
    if node.unit is not None and node.unit != Unit():
        yield replace(node, unit=Unit())


def _defaults(value: Any, fixed: tuple[str, ...]) -> Iterator[Any]:
    """With one field as it is by default."""
    for each in fields(value):
        if each.name not in fixed and getattr(value, each.name) != each.default:
            yield replace(value, **{each.name: each.default})


def _kept(case: Case) -> Case:
    """Without what speaks of modules that are gone."""
    names = {node.name for node in walk(case.root)}
    leaves = {node.name for node in walk(case.root) if not node.children}
    ties = tuple(tie for tie in case.ties if leaves.issuperset(tie))

    def is_there(path: str) -> bool:
        return all(part in names or part.isdigit() for part in path.split(".") if part)

    steps = tuple(
        replace(
            step,
            fault=step.fault if step.fault and step.fault[1] in names else None,
            before=tuple(
                event
                for event in step.before
                if event[0] not in ("freeze", "unfreeze", "unshard", "reshard")
                or is_there(event[1])
            ),
            passes=tuple(
                kind if " " not in kind or is_there(kind.split(" ")[1]) else "plain"
                for kind in step.passes
            ),
        )
        for step in case.steps
    )
    prefetch = tuple(entry for entry in case.prefetch if all(map(is_there, (entry[1], *entry[2]))))
    return replace(case, ties=ties, steps=steps, prefetch=prefetch)
