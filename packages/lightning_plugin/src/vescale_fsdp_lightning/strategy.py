"""``VeScaleFSDPStrategy`` for ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.strategies import ParallelStrategy

from vescale_fsdp_lightning.lifecycle import Lifecycle

__all__ = ["VeScaleFSDPStrategy"]


class VeScaleFSDPStrategy(Lifecycle, ParallelStrategy):  # type: ignore[misc]
    """The strategy of ``strategy="vescale_fsdp"``; `Sharding` documents its arguments."""

    namespace = "lightning.pytorch"
