"""Refusing parameters that have no data yet, before anything is communicated."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from vescale_fsdp.engine.slot import Slot


def check_materialized(modules: Iterable[nn.Module], slots: Iterable[Slot]) -> None:
    """Raise if a parameter of a unit, which has these modules, is still on meta."""
    on_meta = [slot for slot in slots if slot.registered().is_meta]
    if on_meta:
        names = [slot.fqn for slot in _children_first(modules, on_meta)]
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, "
            f"but the following were still on meta device: {names}\n"
            "For example, call module.to_empty(device) to materialize to device and "
            "call module.reset_parameters() on each module to initialize values."
        )


def _children_first(modules: Iterable[nn.Module], slots: list[Slot]) -> list[Slot]:
    """The order in which FSDP2 has them: those of a module come after those of its children."""
    places: dict[tuple[int, str], int] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        for name in module._parameters:
            places.setdefault((id(module), name), len(places))

    for module in modules:
        visit(module)

    def place(slot: Slot) -> int:
        found = (places.get((id(ref()), name)) for ref, name in slot.sites)
        return min((each for each in found if each is not None), default=len(places))

    return sorted(slots, key=place)
