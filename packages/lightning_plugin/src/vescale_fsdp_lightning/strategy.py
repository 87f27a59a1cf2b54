"""``VeScaleFSDPStrategy`` for ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy

from vescale_fsdp_lightning.lifecycle import Lifecycle

__all__ = ["VeScaleFSDPStrategy"]


class VeScaleFSDPStrategy(Lifecycle, ModelParallelStrategy):  # type: ignore[misc]
    """The strategy behind the string; `Sharding` has its arguments and their documentation."""
