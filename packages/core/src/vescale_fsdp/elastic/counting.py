"""Counts the steps of optimizers, to know whether a step that a loop was left in has been made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from vescale_fsdp.checkpoint.contents import Optimizers


class StepCounter:
    """Counts the steps of some optimizers until it is closed. Cost: a hook on each."""

    def __init__(self, optimizers: Optimizers) -> None:
        several = optimizers.values() if isinstance(optimizers, Mapping) else [optimizers]
        self._optimizers = [each for each in several if each is not None]
        self._counts = [0] * len(self._optimizers)
        self._hooks = [
            each.register_step_post_hook(partial(self._add, index))
            for index, each in enumerate(self._optimizers)
        ]

    @property
    def counts(self) -> Sequence[int]:
        """The steps of each."""
        return tuple(self._counts)

    def idle(self, since: Sequence[int]) -> list[Optimizer]:
        """The optimizers that have made no step since these were the `counts`."""
        pairs = zip(self._optimizers, self._counts, since, strict=True)
        return [optimizer for optimizer, now, before in pairs if now == before]

    def _add(self, index: int, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._counts[index] += 1

    def close(self) -> None:
        """Take the hooks away."""
        for each in self._hooks:
            each.remove()
