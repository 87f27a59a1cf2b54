"""What ranks compare before they run a model together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vescale_fsdp.engine.unit import Unit

__all__ = ["fingerprint_of"]


def fingerprint_of(units: list[Unit]) -> list[str]:
    """What must be the same on every rank, one entry per unit and parameter."""
    entries = []
    for unit in units:
        entries.append(
            f"unit {unit.fqn!r} (reshard_after_forward={unit.reshard_after_forward}, in "
            f"{unit.num_parts} parts, {unit.mp_policy}, unused={unit.unused!r}, "
            f"in_flight={unit.in_flight}, {unit.row})"
        )
        for group in unit.groups:
            plan = f"layout {group.layout.digest[:12]} over {group.num_shards} ranks"
            for slot, (gather, reduce) in zip(group.slots, group.codings, strict=True):
                travels = f", gathered as {gather}" if gather else ""
                travels += f", reduced as {reduce}" if reduce else ""
                entries.append(
                    f"parameter {slot.fqn!r} (shape {tuple(slot.shape)}, {slot.sharded.dtype}, "
                    f"requires_grad={slot.sharded.requires_grad}, {plan}{travels})"
                )
    return entries
