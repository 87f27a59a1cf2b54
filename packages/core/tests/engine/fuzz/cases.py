"""A case: a model, how it is sharded, and what happens in its steps. Frozen data, no torch.

Conditions are Python expressions over ``now`` (``step``, ``micro``, ``rank``) and ``i``, the number
of a copy. They are written into the program as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["CONTAINERS", "Case", "Node", "Step", "Unit", "paths_of", "walk"]

CONTAINERS = ("Chain", "Residual")


@dataclass(frozen=True)
class Unit:
    """One call of ``fully_shard``; values as they are written in the program.

    Attributes:
        dtype: of compute, by a MixedPrecisionPolicy; empty: as the parameters.
        joins: one list with the unit before it among its siblings.
    """

    reshard: str = "None"
    granularity: str = "None"
    dtype: str = ""
    joins: bool = False


@dataclass(frozen=True)
class Node:
    """A module and how its parent calls it.

    Attributes:
        kind: a class of `parts`, or "Chain" or "Residual", which have children.
        copies: more than 1: a ModuleList of so many, one after the other.
        times: calls in a row.
        when: the condition under which it runs; empty: always.
        checkpoint: ``use_reentrant`` of an activation checkpoint around it; empty: none.
        joins: in one checkpoint with the sibling before it.
        changed: its output is changed in place.
        output: of a container: "tensor", "view", "tuple" or "dict"; of Heads: "tuple" or "dict".
        extra: of Heads: when its second output is used.
        guided: of a container: its input makes a step along the gradient of its output.
    """

    name: str
    kind: str
    children: tuple[Node, ...] = ()
    unit: Unit | None = None
    copies: int = 1
    times: int = 1
    when: str = ""
    frozen: bool = False
    checkpoint: str = ""
    joins: bool = False
    changed: bool = False
    output: str = "tensor"
    extra: str = ""
    guided: bool = False


@dataclass(frozen=True)
class Step:
    """One step of the optimizer.

    Attributes:
        before: what happens before it: ("eval", "no_grad"), ("freeze", "n1.n2"), ...
        passes: forwards and backwards, one entry a micro-batch (`runner` has the kinds).
        syncs_last_only: gradients are reduced in the last micro-batch.
        clips: whose function clips the gradients: "ours" or "torch"; or one of `habits.CLIPS`.
        halves: the script halves the gradients before the optimizer sees them.
        fault: ("forward" or "backward", name): there all ranks raise, reset, and begin again.
    """

    before: tuple[tuple[str, str], ...] = ()
    passes: tuple[str, ...] = ("plain",)
    syncs_last_only: bool = False
    fault: tuple[str, str] | None = None
    clips: str = ""
    halves: bool = False
    zeroes: bool = True


@dataclass(frozen=True)
class Case:
    """All of it.

    Attributes:
        ties: pairs of names of leaves that share their weight.
        prefetch: (forward or backward, path, paths): lists that the user sets.
    """

    root: Node
    steps: tuple[Step, ...]
    world_size: int = 2
    width: int = 4
    sharding: str = ""
    in_flight: int = 2
    optimizer: str = "sgd"
    set_to_none: bool = True
    input_wants_gradient: bool = False
    ties: tuple[tuple[str, str], ...] = ()
    prefetch: tuple[tuple[str, str, tuple[str, ...]], ...] = field(default=())


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it, parents first."""
    yield node
    for child in node.children:
        yield from walk(child)


def paths_of(root: Node) -> list[tuple[str, Node]]:
    """Every module that the nodes make, by its path; copies one by one."""
    found = [("", root)]
    for prefix, node in found:
        dot = f"{prefix}." if prefix else ""
        for child in node.children:
            if child.copies == 1:
                found.append((f"{dot}{child.name}", child))
            else:
                found += [(f"{dot}{child.name}.{i}", child) for i in range(child.copies)]
    return found
