"""Models that ``trl`` shards itself: references of DPO, KTO and GRPO, teachers, rewards.

``trl`` does not hand them to the accelerator: under FSDP its ``prepare_fsdp`` calls torch's
``fully_shard``, with one unit for the whole model and other cuts than those of the model that
trains. So a reference could not follow it (``sync_ref_model=True``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from vescale_fsdp_accelerate.plugin import VeScaleFSDPPlugin
from vescale_fsdp_hook import when_imported

__all__ = ["register"]


def register() -> None:
    """Have ``trl`` leave sharding to our accelerator. Idempotent."""
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
    for name, each in list(sys.modules.items()):  # it may have been imported by name already
        if name.partition(".")[0] == "trl" and vars(each).get("prepare_fsdp") is stock:
            each.prepare_fsdp = prepare_fsdp  # type: ignore[attr-defined]
