"""The root: the unit that is called first gets a schedule for itself and all units below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vescale_fsdp.engine.schedule import Schedule
from vescale_fsdp.engine.ties import refuse_waiting

if TYPE_CHECKING:
    from vescale_fsdp.engine.unit import Unit

__all__ = ["check_materialized", "make_root", "sole_module"]


def sole_module(unit: Unit) -> nn.Module:
    """The module of a unit that is to be a root.

    Raises:
        RuntimeError: it has several.
    """
    if len(unit.module_refs) > 1:
        raise RuntimeError(
            "FSDP requires a single root module but got "
            f"{tuple(type(ref()).__name__ for ref in unit.module_refs)}; call fully_shard on the "
            "module around them as well"
        )
    module = unit.module_refs[0]()
    assert module is not None, "somebody is calling it"
    return module


def make_root(unit: Unit, module: nn.Module, units: dict[str, Unit]) -> None:
    """Make ``unit`` the root of one schedule with all units below it.

    Args:
        unit: of ``module``, which is called.
        units: all in ``module``, by module name, outermost first.

    Raises:
        RuntimeError: a unit below has run on its own before; or parameters are still on meta.
        RankMismatchError: other ranks have another model.
    """
    refuse_waiting(module)
    for name, below in units.items():
        if below.schedule is not None:
            raise RuntimeError(
                f"FSDP state has already been lazily initialized for {name}\n"
                "FSDP requires running forward through the root module first"
            )
    names = {id(param): name for name, param in module.named_parameters()}
    for name, below in units.items():
        below.fqn = name
        for group in below.groups:
            if group.is_sharded:
                group.rebind()
            for slot in group.slots:
                registered = slot.sharded if group.is_sharded else slot.gathered
                slot.fqn = names.get(id(registered), slot.fqn)
    check_materialized(list(units.values()))
    schedule = Schedule(list(units.values()), unused=unit.unused, in_flight=unit.in_flight)
    unit.is_root = True
    for below in units.values():
        below.schedule = schedule


def check_materialized(units: list[Unit]) -> None:
    """Raise if a parameter of the units has no data yet."""
    on_meta = [
        slot.fqn
        for unit in units
        for group in unit.groups
        for slot in group.slots
        if group.is_on_meta
    ]
    if on_meta:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the "
            f"following were still on meta device: {on_meta}\n"
            "For example, call module.to_empty(device) and load or initialize the weights"
        )
