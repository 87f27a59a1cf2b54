"""Registers the string "vescale_fsdp" with Lightning, without an import by the user.

Lightning has no plug-in mechanism that runs before it looks up a strategy. torch has one: at the
end of ``import torch`` it calls the entry points of the group ``torch.backends``. Ours is
`install`. It waits for the import of Lightning's strategies, and adds our names to its registry.
Nothing else of Lightning changes, now or later.

``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables it; ``import vescale_fsdp_lightning`` then does the
same. It uses only the standard library, because torch is still being imported when it runs.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from vescale_fsdp_hook import when_imported

__all__ = ["NAMES", "callback_base", "first_of", "install", "strategy_class"]

NAMES: dict[str, dict[str, Any]] = {  # names of strategies, and the arguments that they imply
    "vescale_fsdp": {},
    "vescale_fsdp_cpu_offload": {"cpu_offload": True},
}
_DESCRIPTION = "veScale-FSDP: fully-sharded data parallel in whole blocks"
# Separate copies of Lightning's code with separate classes, and the names of their registries.
_NAMESPACES = {
    "lightning.pytorch": "StrategyRegistry",
    "pytorch_lightning": "StrategyRegistry",
    "lightning.fabric": "STRATEGY_REGISTRY",
    "lightning_fabric": "STRATEGY_REGISTRY",
}


def install() -> None:
    """Arrange that the registry of each namespace of Lightning gets our names."""
    for namespace in _NAMESPACES:
        when_imported(f"{namespace}.strategies", _REGISTER[namespace])


def _register(namespace: str, module: ModuleType) -> None:
    registry = getattr(module, _NAMESPACES[namespace])
    for name, options in NAMES.items():
        if name not in registry:
            make = partial(_make_strategy, namespace)
            registry.register(name, make, description=_DESCRIPTION, **options)


_REGISTER = {namespace: partial(_register, namespace) for namespace in _NAMESPACES}


def _make_strategy(namespace: str, **options: Any) -> Any:
    return strategy_class(namespace)(**options)


@cache
def strategy_class(namespace: str) -> Any:
    """Return the class of our strategy for one of Lightning's namespaces.

    It is ``VeScaleFSDPStrategy`` for the Trainer, ``VeScaleFabricStrategy`` for Fabric.
    """
    if namespace == "lightning.pytorch":
        return import_module("vescale_fsdp_lightning.strategy").VeScaleFSDPStrategy
    if namespace == "lightning.fabric":
        return import_module("vescale_fsdp_lightning.fabric_strategy").VeScaleFabricStrategy
    base = import_module(f"{namespace}.strategies").ParallelStrategy
    if namespace == "pytorch_lightning":
        mixin = import_module("vescale_fsdp_lightning.lifecycle").Lifecycle
        name = "VeScaleFSDPStrategy"
    else:
        mixin = import_module("vescale_fsdp_lightning.fabric").FabricLifecycle
        name = "VeScaleFabricStrategy"
    home = {"__module__": __package__}  # users import it from the package
    return type(name, (mixin, base), {"__doc__": mixin.__doc__, "namespace": namespace, **home})


def first_of(namespaces: tuple[str, str]) -> str:
    """Return the namespace of Lightning that this process uses; the first if it uses both."""
    first, second = namespaces
    if first in sys.modules:
        return first
    if second in sys.modules or find_spec(first.partition(".")[0]) is None:
        return second
    return first


def callback_base() -> Any:
    """Return the class ``Callback`` of the Trainer that this process uses."""
    namespace = first_of(("lightning.pytorch", "pytorch_lightning"))
    return import_module(f"{namespace}.callbacks").Callback
