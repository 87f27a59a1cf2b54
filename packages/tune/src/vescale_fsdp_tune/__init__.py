"""Settings of veScale-FSDP for a memory budget, and what a step costs, computed before training.

``fully_shard(model, budget="80%")`` measures the machine and the model, and shards with the fastest
settings that fit. ``vescale-fsdp plan`` and ``tune`` compute the same for ranks that are not there.

* `costs` is the cost model: memory, bytes sent and seconds of a step. It loads no torch.
* `budget` tries a model, measures a machine, and shards with what is chosen.
* `commands` adds ``plan`` and ``tune`` to the command line.

The names below load what they need at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vescale_fsdp_tune.budget import Budget, fully_shard, tuning_of

__version__ = "0.1.0.dev0"
__all__ = ["Budget", "fully_shard", "tuning_of"]


def __getattr__(name: str) -> Any:
    if name == "costs":
        return import_module("vescale_fsdp_tune.costs")
    if name not in __all__:
        raise AttributeError(f"module 'vescale_fsdp_tune' has no attribute {name!r}")
    return getattr(import_module("vescale_fsdp_tune.budget"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
