"""``VeScaleFabricStrategy`` for ``lightning.fabric``."""

from __future__ import annotations

from lightning.fabric.strategies.parallel import ParallelStrategy

from vescale_fsdp_lightning.fabric import FabricLifecycle

__all__ = ["VeScaleFabricStrategy"]


class VeScaleFabricStrategy(FabricLifecycle, ParallelStrategy):  # type: ignore[misc]
    """The strategy of ``strategy="vescale_fsdp"``; `Sharding` documents its arguments."""

    namespace = "lightning.fabric"
