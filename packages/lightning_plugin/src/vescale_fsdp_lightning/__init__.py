"""veScale-FSDP for Lightning: ``Trainer(strategy="vescale_fsdp")``.

The string works without an import of this package (see `_autoload`). Importing it does the same
by hand, and ``VeScaleFSDPStrategy`` is the class behind the string, for arguments::

    from vescale_fsdp_lightning import VeScaleFSDPStrategy
    Trainer(strategy=VeScaleFSDPStrategy(granularity=Granularity.rows(1)))
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vescale_fsdp_lightning._autoload import install

if TYPE_CHECKING:
    from vescale_fsdp_lightning.strategy import VeScaleFSDPStrategy

__version__ = "0.1.0.dev0"
__all__ = ["VeScaleFSDPStrategy"]

install()


def __getattr__(name: str) -> Any:
    if name != "VeScaleFSDPStrategy":
        raise AttributeError(f"module 'vescale_fsdp_lightning' has no attribute {name!r}")
    if find_spec("lightning") is None and find_spec("pytorch_lightning") is not None:
        from vescale_fsdp_lightning._autoload import strategy_class

        return strategy_class("pytorch_lightning")
    return import_module("vescale_fsdp_lightning.strategy").VeScaleFSDPStrategy
