"""``VeScaleFabricStrategy`` for ``lightning.fabric``."""

from __future__ import annotations

from lightning.fabric.strategies.parallel import ParallelStrategy

from vescale_fsdp_lightning.fabric import FabricLifecycle

__all__ = ["VeScaleFabricStrategy"]


class VeScaleFabricStrategy(FabricLifecycle, ParallelStrategy):  # type: ignore[misc]
    """The strategy behind the string; `Sharding` has its arguments and their documentation."""

    namespace = "lightning.fabric"
