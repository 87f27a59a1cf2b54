"""GradientBuffer: a group's local gradients on their way to the reduction.

Each gradient is copied once, as it appears, with the cast to the buffer's dtype, into its place;
a second one for the same tensor is added. The memory is lent by a pool from the first gradient
until the reduction has been finished. Gaps and tensors without a gradient are zero when it is
sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from vescale_fsdp.dbuffer.memory import SlabPool
from vescale_fsdp.planner import ShardLayout

__all__ = ["GradientBuffer"]


class GradientBuffer:
    """Local, not yet reduced gradients of one group, from its first gradient to `release`.

    Args:
        layout: where each tensor lies.
        shapes: global shape of each tensor, in the order of the layout's specs.
        dtype: of the buffer, and so of what travels when the reduction does not cast.
        pool: lends ``layout.total_size`` elements.
    """

    def __init__(
        self,
        layout: ShardLayout,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        pool: SlabPool,
    ) -> None:
        self._layout, self._shapes, self._pool = layout, shapes, pool
        self._written: set[int] = set()
        self.flat = pool.take(layout.total_size, dtype)

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of tensor ``index``: one copy, or one addition if there is one."""
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        view = self._part(index).view(self._shapes[index])
        if index in self._written:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self._written.add(index)

    def seal(self) -> torch.Tensor:
        """Zero what no gradient was written to, and return the flat buffer, ready to send."""
        for index in range(len(self._shapes)):
            if index not in self._written:
                self._part(index).zero_()
        for gap in self._gaps():
            gap.zero_()
        return self.flat

    def release(self) -> None:
        """Give the memory back, and whatever is in it."""
        self._pool.give(self.flat)

    def _part(self, index: int) -> torch.Tensor:
        start = self._layout.offsets[index]
        return self.flat[start : start + self._shapes[index].numel()]

    def _gaps(self) -> Iterator[torch.Tensor]:
        """The parts of the buffer that belong to no tensor, in order."""
        position = 0
        intervals = zip(self._layout.offsets, self._shapes, strict=True)
        for start, shape in sorted((s, shape) for s, shape in intervals if shape.numel()):
            if start > position:
                yield self.flat[position:start]
            position = start + shape.numel()
        if position < self._layout.total_size:
            yield self.flat[position:]
