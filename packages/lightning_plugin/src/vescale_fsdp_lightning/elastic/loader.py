"""The loader of an elastic training: it begins at any sample, and says when it loads a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import vescale_fsdp_elastic as elastic

__all__ = ["Loader"]


class Loader(elastic.StepLoader):
    """A `StepLoader` for Lightning's loop. Make it with `like`.

    Attributes:
        before_batch: called before each batch is loaded, or taken from the loader's workers.
    """

    before_batch: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._each(super().__iter__())  # its workers start now

    def _each(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            self.before_batch()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def begin(self, step: int, num_samples: int) -> None:
        """Let a step begin after a number of samples, whatever earlier steps have taken."""
        batches = self.micro_batches
        order, shift = batches.order, num_samples - step * batches.global_batch
        batches.order = _Shifted(order.num_samples, order.seed, shift=shift)


@dataclass
class _Shifted(elastic.Order):
    """An order in which each position is that of a later or earlier sample."""

    shift: int = 0

    def indices(self, start: int, stop: int) -> Iterator[int]:
        return super().indices(start + self.shift, stop + self.shift)
