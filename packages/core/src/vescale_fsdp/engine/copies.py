"""Copies of sharded modules (``copy.deepcopy``): each has units of its own."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from vescale_fsdp.dbuffer import plain_tensors
from vescale_fsdp.engine.unit import UNIT_ATTRIBUTE, Unit


def copied(unit: Unit, memo: dict[int, Any]) -> Unit:
    """A unit of its own with the same parameters, for ``copy.deepcopy``; of no module yet.

    Raises:
        RuntimeError: a forward or backward runs, or a context pins the parameters.
    """
    if not unit.is_idle:
        raise RuntimeError(
            f"copy.deepcopy of the sharded module {unit.fqn!r} while a forward or backward "
            "runs or its parameters are unsharded; copy it between steps"
        )
    unit.reshard()
    twin = Unit(
        [],
        unit.mp_policy,
        unit.reshard_after_forward,
        unit.unused,
        unit.in_flight,
        unit.row,
        broadcasts_buffers=unit.broadcasts_buffers,
    )
    for name in _SET_BY_USERS:
        setattr(twin, name, getattr(unit, name))
    with plain_tensors():
        twin.groups = [g.copied(memo, twin.gradient_callback()) for g in unit.groups]
    memo[id(unit)] = twin
    twin.forward_prefetch = _copies(unit.forward_prefetch, memo)
    twin.backward_prefetch = _copies(unit.backward_prefetch, memo)
    return twin


_SET_BY_USERS = (
    "num_parts",
    "reshard_after_backward",
    "requires_gradient_sync",
    "requires_all_reduce",
    "unshard_in_backward",
    "gives_zeros",
    "max_reductions",
)


def join(unit: Unit, module: nn.Module, original: Unit, memo: dict[int, Any]) -> None:
    """Let ``unit`` belong to ``module``, the copy of a module of ``original``."""
    object.__setattr__(module, UNIT_ATTRIBUTE, unit)
    unit.module_refs.append(weakref.ref(module))
    for group, former in zip(unit.groups, original.groups, strict=True):
        for slot, old in zip(group.slots, former.slots, strict=True):
            copies = [(memo.get(id(ref())), name) for ref, name in old.sites]
            slot.sites = [(weakref.ref(m), name) for m, name in copies if m is not None]


def _copies(units: list[Unit] | None, memo: dict[int, Any]) -> list[Unit] | None:
    return None if units is None else [memo.get(id(u)) or copied(u, memo) for u in units]
