"""``VeScaleFabricStrategy`` for ``lightning.fabric``."""

from __future__ import annotations

from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

from vescale_fsdp_lightning.fabric import FabricLifecycle

__all__ = ["VeScaleFabricStrategy"]


class VeScaleFabricStrategy(FabricLifecycle, ModelParallelStrategy):  # type: ignore[misc]
    """The strategy behind the string; `Sharding` has its arguments and their documentation."""
