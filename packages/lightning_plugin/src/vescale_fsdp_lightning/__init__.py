"""veScale-FSDP for Lightning: ``Trainer(strategy="vescale_fsdp")``, ``Fabric(strategy=...)``.

The strings work without an import of this package (see `_autoload`). An explicit import does the
same. To pass arguments, use the classes of the strategies::

    from vescale_fsdp_lightning import VeScaleFSDPStrategy
    Trainer(strategy=VeScaleFSDPStrategy(granularity="rows:32", state_dict_type="full"))

The files:

* registration of the string: `_autoload`, and nothing else of Lightning changes
* arguments: `options`, `precision`
* processes and the model: `sharding`, which Trainer and Fabric share; `norms` of gradients
* checkpoints: `plain` (values without pickle), `places` and `store` (paths), `torch_format`,
  `checkpoints` (Trainer), `fabric_checkpoints`; `dictionary` reads a directory in one process,
  `consolidate` writes it as one file, and `loading` gives it to Lightning's own loaders
* strategies: `lifecycle` and `strategy` (Trainer), `fabric` and `fabric_strategy`
* ranks that come and go: `elastic`, which the strategy of the Trainer loads if it is asked for
* callbacks: `ema`, `profile`, `throughput`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vescale_fsdp_lightning._autoload import first_of, install, strategy_class

if TYPE_CHECKING:
    from vescale_fsdp_lightning.ema import ShardedEMA
    from vescale_fsdp_lightning.fabric_strategy import VeScaleFabricStrategy
    from vescale_fsdp_lightning.loading import SealedCheckpointIO, load_from_checkpoint
    from vescale_fsdp_lightning.norms import grad_norm
    from vescale_fsdp_lightning.profile import ProfileSteps
    from vescale_fsdp_lightning.strategy import VeScaleFSDPStrategy
    from vescale_fsdp_lightning.throughput import Throughput

__version__ = "0.1.0.dev0"
__all__ = [
    "ProfileSteps",
    "SealedCheckpointIO",
    "ShardedEMA",
    "Throughput",
    "VeScaleFSDPStrategy",
    "VeScaleFabricStrategy",
    "grad_norm",
    "load_from_checkpoint",
]

# For each name its module, or the namespaces of Lightning whose base class it needs.
_HOME = {
    "ProfileSteps": "profile",
    "SealedCheckpointIO": "loading",
    "ShardedEMA": "ema",
    "Throughput": "throughput",
    "grad_norm": "norms",
    "load_from_checkpoint": "loading",
}
_STRATEGIES = {
    "VeScaleFSDPStrategy": ("lightning.pytorch", "pytorch_lightning"),
    "VeScaleFabricStrategy": ("lightning.fabric", "lightning_fabric"),
}

install()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"vescale_fsdp_lightning.{_HOME[name]}"), name)
    if name not in _STRATEGIES:
        raise AttributeError(f"module 'vescale_fsdp_lightning' has no attribute {name!r}")
    return strategy_class(first_of(_STRATEGIES[name]))
