"""Makes ``trl`` shard its other models with our accelerator: references, teachers, reward models.

Under FSDP, ``trl`` shards them itself: ``prepare_fsdp`` calls torch's ``fully_shard`` with one unit
for the whole model. Its placements differ from those of the trained model, so that a reference
could not be updated from that model (``sync_ref_model=True``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from vescale_fsdp_accelerate.plugin import VeScaleFSDPPlugin
from vescale_fsdp_hook import when_imported

__all__ = ["register"]


def register() -> None:
    """Replace ``prepare_fsdp`` of ``trl`` when it is imported. Idempotent."""
    when_imported("trl.models.utils", _replace)


def _replace(module: ModuleType) -> None:
    stock: Callable[[nn.Module, Any], nn.Module] | None = vars(module).get("prepare_fsdp")
    if stock is None or hasattr(stock, "_vescale_fsdp"):
        return

    @functools.wraps(stock)
    def prepare_fsdp(model: nn.Module, accelerator: Any) -> nn.Module:
        if not isinstance(accelerator.state.fsdp_plugin, VeScaleFSDPPlugin):
            return stock(model, accelerator)
        sharded: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
        return sharded.eval()

    prepare_fsdp._vescale_fsdp = True  # type: ignore[attr-defined]
    module.prepare_fsdp = prepare_fsdp  # type: ignore[attr-defined]
