"""How the string "vescale_fsdp" comes into Lightning's registry without an import by the user.

Lightning has no plug-in mechanism that runs before it looks up a strategy. torch has one: at the
end of ``import torch`` it calls the entry points of the group ``torch.backends``. Ours is
`install`, which does one thing: it asks to be told when one of Lightning's strategy registries
is imported, and then adds the name to it. In a process without Lightning nothing more happens.

Switch it off with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``; ``import vescale_fsdp_lightning`` then
does the same. Standard library only: torch is still being imported when this runs.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

from vescale_fsdp_hook import when_imported

__all__ = ["NAME", "install", "strategy_class"]

NAME = "vescale_fsdp"
_DESCRIPTION = "veScale-FSDP: fully-sharded data parallel in whole blocks"
# The two are separate copies of one code base, with separate classes.
_NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


def install() -> None:
    """Have the strategy registered in each of Lightning's namespaces when it is imported."""
    for namespace in _NAMESPACES:
        when_imported(f"{namespace}.strategies", _REGISTER[namespace])


def _register(namespace: str, module: ModuleType) -> None:
    if NAME not in module.StrategyRegistry:
        make = partial(_make_strategy, namespace)
        module.StrategyRegistry.register(NAME, make, description=_DESCRIPTION)


_REGISTER = {namespace: partial(_register, namespace) for namespace in _NAMESPACES}


def _make_strategy(namespace: str, **options: Any) -> Any:
    return strategy_class(namespace)(**options)


@cache
def strategy_class(namespace: str) -> Any:
    """``VeScaleFSDPStrategy`` for ``lightning.pytorch`` or ``pytorch_lightning``."""
    if namespace == "lightning.pytorch":
        return import_module("vescale_fsdp_lightning.strategy").VeScaleFSDPStrategy
    from vescale_fsdp_lightning.lifecycle import Lifecycle

    base = import_module(f"{namespace}.strategies").ModelParallelStrategy
    return type("VeScaleFSDPStrategy", (Lifecycle, base), {"__doc__": Lifecycle.__doc__})
