"""Registers the string "vescale_fsdp" with Lightning, without an import by the user.

Lightning has no plug-in mechanism that runs before it looks up a strategy. torch has one: at the
end of ``import torch`` it calls the entry points of the group ``torch.backends``. Ours is
`install`. It waits for the import of certain Lightning modules, and then changes them:

* the strategy registries get our names
* the check of precisions refuses "16-mixed" on CPU for our strategies
* the loaders of checkpoint files also read sealed directories
* ``grad_norm`` also accepts sharded gradients
* LightningCLI finds our class by its short name

In a process without Lightning nothing more happens.

``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables it; ``import vescale_fsdp_lightning`` then does the
same. It uses only the standard library, because torch is still being imported when it runs.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import PurePath
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
# Lightning's classes that choose strategy and precision: the class, its method, and its attribute
# with the user's argument.
_OF_TRAINER = ("_AcceleratorConnector", "_check_and_init_precision", "_precision_flag")
_OF_FABRIC = ("_Connector", "_check_and_init_precision", "_precision_input")
_CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": _OF_TRAINER,
    "pytorch_lightning.trainer.connectors.accelerator_connector": _OF_TRAINER,
    "lightning.fabric.connector": _OF_FABRIC,
    "lightning_fabric.connector": _OF_FABRIC,
}
_LOADERS = (  # modules that load files, for load_from_checkpoint and for strategies
    "lightning.pytorch.core.saving",
    "pytorch_lightning.core.saving",
    "lightning.fabric.plugins.io.torch_io",
    "lightning_fabric.plugins.io.torch_io",
)
_CLIS = ("lightning.pytorch", "pytorch_lightning")
_NORMS = ("lightning.pytorch.utilities", "pytorch_lightning.utilities")


def install() -> None:
    """Arrange that each namespace of Lightning is changed when it is imported."""
    for namespace in _NAMESPACES:
        when_imported(f"{namespace}.strategies", _REGISTER[namespace])
    for connector in _CONNECTORS:
        when_imported(connector, _check_precision)
    for loader in _LOADERS:
        when_imported(loader, _load_directories)
    for namespace in _CLIS:
        when_imported(f"{namespace}.cli", _NAME_IN_CLI[namespace])
    for norms in _NORMS:
        when_imported(f"{norms}.grads", _take_norms)


def _register(namespace: str, module: ModuleType) -> None:
    registry = getattr(module, _NAMESPACES[namespace])
    for name, options in NAMES.items():
        if name not in registry:
            make = partial(_make_strategy, namespace)
            registry.register(name, make, description=_DESCRIPTION, **options)


_REGISTER = {namespace: partial(_register, namespace) for namespace in _NAMESPACES}


def _make_strategy(namespace: str, **options: Any) -> Any:
    return strategy_class(namespace)(**options)


def _check_precision(module: ModuleType) -> None:
    """Make a connector refuse ``precision="16-mixed"`` on CPU for our strategies.

    Lightning replaces it by "bf16-mixed" before the strategy could refuse it.
    """
    name, method, asked = _CONNECTORS[module.__name__]
    connector = getattr(module, name, None)
    choose = getattr(connector, method, None)
    if choose is None or hasattr(choose, "__wrapped__"):
        return

    @wraps(choose)
    def check_ours_too(self: Any) -> Any:
        is_ours = getattr(self.strategy, "strategy_name", None) == "vescale_fsdp"
        if is_ours and (getattr(self, asked), self._accelerator_flag) == ("16-mixed", "cpu"):
            import_module("vescale_fsdp_lightning.precision").refuse("16-mixed", "cpu")
        return choose(self)

    setattr(connector, method, check_ours_too)


def _load_directories(module: ModuleType) -> None:
    """Make a loader of Lightning also read sealed directories, for which it raises."""
    load = getattr(module, "pl_load", None)
    if load is None or hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def load_directories_too(path_or_url: Any, map_location: Any = None, **options: Any) -> Any:
        try:
            return load(path_or_url, map_location=map_location, **options)
        except (IsADirectoryError, FileNotFoundError, PermissionError):
            dictionary = import_module("vescale_fsdp_lightning.dictionary")
            is_path = isinstance(path_or_url, str | PurePath)
            found = dictionary.load_directory(path_or_url, map_location) if is_path else None
            if found is None:
                raise
            return found

    module.pl_load = load_directories_too  # type: ignore[attr-defined]


def _name_in_cli(namespace: str, module: ModuleType) -> None:
    """Make LightningCLI accept ``class_path: VeScaleFSDPStrategy``, without the module's name.

    It finds short names only of classes that exist when it reads the configuration.
    """
    cli = getattr(module, "LightningCLI", None)
    setup_parser = getattr(cli, "setup_parser", None)
    if setup_parser is None or hasattr(setup_parser, "__wrapped__"):
        return

    @wraps(setup_parser)
    def with_our_class(self: Any, *args: Any, **options: Any) -> Any:
        with suppress(Exception):  # an import of the full name reports the error
            strategy_class(namespace)
        return setup_parser(self, *args, **options)

    cli.setup_parser = with_our_class  # type: ignore[union-attr]


_NAME_IN_CLI = {namespace: partial(_name_in_cli, namespace) for namespace in _CLIS}


def _take_norms(module: ModuleType) -> None:
    """Make Lightning's ``grad_norm`` also accept sharded gradients, for which it raises."""
    grad_norm = getattr(module, "grad_norm", None)
    if grad_norm is None or hasattr(grad_norm, "__wrapped__"):
        return

    @wraps(grad_norm)
    def of_shards_too(module: Any, norm_type: Any, group_separator: str = "/") -> Any:
        if not any(hasattr(param.grad, "device_mesh") for param in module.parameters()):
            return grad_norm(module, norm_type, group_separator)
        norms = import_module("vescale_fsdp_lightning.norms")
        return norms.grad_norm(module, norm_type, group_separator)

    for holder in (module, sys.modules.get(module.__name__.rpartition(".")[0])):
        if getattr(holder, "grad_norm", None) is grad_norm:
            holder.grad_norm = of_shards_too  # type: ignore[union-attr]


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
