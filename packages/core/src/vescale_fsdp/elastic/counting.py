"""Counts the steps of optimizers, to know whether a step that a loop was left in has been made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from vescale_fsdp.checkpoint.contents import Optimizers


class StepCounter:
    """Counts the steps of some optimizers until it is closed. Cost: a hook on each.

    Attributes:
        count: of all of them together.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self.count = 0
        several = optimizers.values() if isinstance(optimizers, Mapping) else [optimizers]
        self._hooks = [
            each.register_step_post_hook(self._add) for each in several if each is not None
        ]

    def _add(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.count += 1

    def close(self) -> None:
        """Take the hooks away."""
        for each in self._hooks:
            each.remove()
