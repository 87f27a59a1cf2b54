"""The root: the unit that is called first gets an engine for itself and all units below it."""

from __future__ import annotations

from torch import nn

from vescale_fsdp.engine.arguments import warn_of_settings_below
from vescale_fsdp.engine.engine import Engine
from vescale_fsdp.engine.materialized import check_materialized
from vescale_fsdp.engine.ties import refuse_waiting
from vescale_fsdp.engine.unit import Unit, units_in
from vescale_fsdp.ragged.tensor import NAME


def make_root(unit: Unit) -> Engine:
    """Make ``unit`` the root of one engine with all units below it. Within `plain_tensors`.

    Raises:
        RuntimeError: it has several modules; a unit below has run on its own before; or parameters
            are still on meta.
        RankMismatchError: other ranks have another model.
    """
    module = _sole_module(unit)
    units = units_in(module)
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
        for slot in below.slots():
            slot.fqn = names.get(id(slot.registered()), slot.fqn)
        check_materialized(below.modules(), below.slots())
        for group in below.groups:
            if group.is_sharded:
                group.rebind()
            for slot in group.slots:
                setattr(slot.sharded, NAME, slot.fqn)
    warn_of_settings_below(unit, units)
    engine = Engine(list(units.values()), unused=unit.unused, in_flight=unit.in_flight)
    unit.is_root = True
    for below in units.values():
        below.engine = engine
    return engine


def _sole_module(unit: Unit) -> nn.Module:
    if len(unit.module_refs) > 1:
        raise RuntimeError(
            "FSDP requires a single root module but got "
            f"{tuple(type(ref()).__name__ for ref in unit.module_refs)}; call fully_shard on the "
            "module around them as well"
        )
    (module,) = unit.modules()
    return module
