"""How the string "vescale_fsdp" comes into Lightning's registries without an import by the user.

Lightning has no plug-in mechanism that runs before it looks up a strategy. torch has one: at the
end of ``import torch`` it calls the entry points of the group ``torch.backends``. Ours is
`install`, which does one thing: it asks to be told when one of Lightning's strategy registries
is imported, and then adds the names to it. In a process without Lightning nothing more happens.

Switch it off with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``; ``import vescale_fsdp_lightning`` then
does the same. Standard library only: torch is still being imported when this runs.
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

NAMES: dict[str, dict[str, Any]] = {  # of the strategies, and the arguments that they stand for
    "vescale_fsdp": {},
    "vescale_fsdp_cpu_offload": {"cpu_offload": True},
}
_DESCRIPTION = "veScale-FSDP: fully-sharded data parallel in whole blocks"
# Separate copies of one code base, with separate classes, and the names of their registries.
_NAMESPACES = {
    "lightning.pytorch": "StrategyRegistry",
    "pytorch_lightning": "StrategyRegistry",
    "lightning.fabric": "STRATEGY_REGISTRY",
    "lightning_fabric": "STRATEGY_REGISTRY",
}


def install() -> None:
    """Have the strategies registered in each of Lightning's namespaces when it is imported."""
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
    _refuse_half_on_cpu()
    return strategy_class(namespace)(**options)


def _refuse_half_on_cpu() -> None:
    """Raise for ``precision="16-mixed"`` on CPU, where Lightning would train in bf16 instead.

    It replaces the precision before it tells the strategy. What was asked for is known to who
    calls the registry only: Lightning's connector, whose constructor is under way.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        connector = frame.f_locals.get("self")
        asked = getattr(connector, "_precision_flag", getattr(connector, "_precision_input", None))
        if asked is not None:
            if asked == "16-mixed" and getattr(connector, "_accelerator_flag", None) == "cpu":
                import_module("vescale_fsdp_lightning.precision").refuse(asked, "cpu")
            return


@cache
def strategy_class(namespace: str) -> Any:
    """``VeScaleFSDPStrategy``, or ``VeScaleFabricStrategy``, for one of Lightning's namespaces."""
    if namespace == "lightning.pytorch":
        return import_module("vescale_fsdp_lightning.strategy").VeScaleFSDPStrategy
    if namespace == "lightning.fabric":
        return import_module("vescale_fsdp_lightning.fabric_strategy").VeScaleFabricStrategy
    base = import_module(f"{namespace}.strategies").ModelParallelStrategy
    if namespace == "pytorch_lightning":
        mixin = import_module("vescale_fsdp_lightning.lifecycle").Lifecycle
        name = "VeScaleFSDPStrategy"
    else:
        mixin = import_module("vescale_fsdp_lightning.fabric").FabricLifecycle
        name = "VeScaleFabricStrategy"
    return type(name, (mixin, base), {"__doc__": mixin.__doc__})


def first_of(namespaces: tuple[str, str]) -> str:
    """The namespace of Lightning that this process uses; of two that are there, the first."""
    first, second = namespaces
    if first in sys.modules:
        return first
    if second in sys.modules or find_spec(first.partition(".")[0]) is None:
        return second
    return first


def callback_base() -> Any:
    """The class of callbacks of the Trainer that this process uses."""
    namespace = first_of(("lightning.pytorch", "pytorch_lightning"))
    return import_module(f"{namespace}.callbacks").Callback
