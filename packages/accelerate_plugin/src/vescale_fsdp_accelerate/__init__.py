"""veScale-FSDP for Accelerate and ``transformers.Trainer``.

``accelerate launch --config vescale.yaml train.py`` runs an unchanged script (see `_autoload`).
With an import, one line of the script changes::

    from vescale_fsdp_accelerate import VeScaleAccelerator, VeScaleFSDPPlugin
    accelerator = VeScaleAccelerator(fsdp_plugin=VeScaleFSDPPlugin(granularity="rows:32"))

The files:

* options and the yaml: `options`; the hook: `_autoload`, `launching`; without it: `run`
* the plug-in: `plugin`
* the model: `sharding`; optimizers: `switching`, `replacing`
* checkpoints: `saving`, `checkpoints`
* ``transformers.Trainer``: `trainer`, `seq2seq`; the other models of ``trl``: `references`
* ranks that come and go: `elastic`, which is loaded if a script asks for it
* `accelerator`, which uses all of these
* the command line: `commands`, `yaml_file`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vescale_fsdp_accelerate.accelerator import VeScaleAccelerator
    from vescale_fsdp_accelerate.elastic.callback import ElasticCallback
    from vescale_fsdp_accelerate.plugin import VeScaleFSDPPlugin

__version__ = "0.1.0.dev0"
__all__ = ["ElasticCallback", "VeScaleAccelerator", "VeScaleFSDPPlugin"]

_HOME = {
    "ElasticCallback": "elastic.callback",
    "VeScaleAccelerator": "accelerator",
    "VeScaleFSDPPlugin": "plugin",
}


def __getattr__(name: str) -> Any:
    if name == "ElasticCallback":
        from vescale_fsdp.errors import companion

        companion("vescale_fsdp_elastic", name, "vescale-fsdp-accelerate[elastic]")
    if name in _HOME:
        return getattr(import_module(f"vescale_fsdp_accelerate.{_HOME[name]}"), name)
    raise AttributeError(f"module 'vescale_fsdp_accelerate' has no attribute {name!r}")
