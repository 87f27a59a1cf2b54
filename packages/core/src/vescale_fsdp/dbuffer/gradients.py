"""GradientBuffer: a group's local gradients on their way to the reduction.

Each gradient is copied once, as it appears, with the cast to the buffer's dtype, into its view;
a second one for the same tensor is added. Memory exists from the first gradient until the
reduction has been finished. Gaps and tensors without a gradient are zero when it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale_fsdp.dbuffer.flat import FlatBuffer
from vescale_fsdp.planner import ShardLayout

__all__ = ["GradientBuffer"]


class GradientBuffer:
    """Local, not yet reduced gradients of one group.

    Args:
        layout, shapes, dtype, device: as of `FlatBuffer`.
    """

    def __init__(
        self,
        layout: ShardLayout,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.buffer = FlatBuffer(layout, shapes, dtype, device)
        self._written: set[int] = set()

    @property
    def dtype(self) -> torch.dtype:
        """Of the buffer, and so of what travels when the reduction does not cast."""
        return self.buffer.flat.dtype

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of tensor ``index``: one copy, or one addition if there is one."""
        self.buffer.materialize()
        view = self.buffer.views[index]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if index in self._written:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self._written.add(index)

    def seal(self) -> torch.Tensor:
        """Zero what no gradient was written to, and return the flat buffer, ready to send."""
        self.buffer.materialize()
        for index, view in enumerate(self.buffer.views):
            if index not in self._written:
                view.zero_()
        for gap in self.buffer.gaps():
            gap.zero_()
        self._written.clear()
        return self.buffer.flat

    def release(self) -> None:
        """Drop the memory, and whatever was in it."""
        self._written.clear()
        self.buffer.release()
