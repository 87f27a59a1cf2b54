"""The root: the unit that is called first gets an engine for itself and all units below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vescale_fsdp.engine.engine import Engine
from vescale_fsdp.engine.slot import Slot
from vescale_fsdp.engine.ties import refuse_waiting
from vescale_fsdp.ragged.assignment import NAME

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
    """Make ``unit`` the root of one engine with all units below it.

    Args:
        unit: of ``module``, which is called.
        units: all in ``module``, by module name, outermost first.

    Raises:
        RuntimeError: a unit below has run on its own before; or parameters are still on meta.
        RankMismatchError: other ranks have another model.
    """
    refuse_waiting(module)
    for name, below in units.items():
        if below.engine is not None:
            raise RuntimeError(
                f"FSDP state has already been lazily initialized for {name}\n"
                "FSDP requires running forward through the root module first"
            )
    names = {id(param): name for name, param in module.named_parameters()}
    for name, below in units.items():
        below.fqn = name
        for slot in (slot for group in below.groups for slot in group.slots):
            slot.fqn = names.get(id(slot.registered()), slot.fqn)
        check_materialized([below])
        for group in below.groups:
            if group.is_sharded:
                group.rebind()
            for slot in group.slots:
                setattr(slot.sharded, NAME, slot.fqn)
    engine = Engine(list(units.values()), unused=unit.unused, in_flight=unit.in_flight)
    unit.is_root = True
    for below in units.values():
        below.engine = engine


def check_materialized(units: list[Unit]) -> None:
    """Raise if a parameter of the units has no data yet; name those of the first such unit."""
    for unit in units:
        slots = [slot for group in unit.groups for slot in group.slots]
        on_meta = [slot for slot in slots if slot.registered().is_meta]
        if on_meta:
            names = [slot.fqn for slot in _children_first(unit, on_meta)]
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, "
                f"but the following were still on meta device: {names}\n"
                "For example, call module.to_empty(device) to materialize to device and "
                "call module.reset_parameters() on each module to initialize values."
            )


def _children_first(unit: Unit, slots: list[Slot]) -> list[Slot]:
    """The order in which FSDP2 has them: those of a module come after those of its children."""
    places: dict[tuple[int, str], int] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        for name in module._parameters:
            places.setdefault((id(module), name), len(places))

    for ref in unit.module_refs:
        module = ref()
        if module is not None:
            visit(module)

    def place(slot: Slot) -> int:
        found = (places.get((id(ref()), name)) for ref, name in slot.sites)
        return min((each for each in found if each is not None), default=len(places))

    return sorted(slots, key=place)
