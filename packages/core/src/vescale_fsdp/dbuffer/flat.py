"""FlatBuffer: a flat tensor over all shards of a group, whose memory comes and goes.

It is one Storage object for life whose size goes to 0 and back. Views of it are made once:
autograd saves them in forward, and finds the data there again in backward. They are made with
``set_``, so each has a version counter of its own; an asynchronous collective bumps the counter
of the flat tensor from its own thread, after the call has returned, and must not invalidate
what autograd saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from vescale_fsdp.planner import ShardLayout
from vescale_fsdp.ragged import contiguous_strides

__all__ = ["FlatBuffer", "plain_tensors"]


class FlatBuffer:
    """``layout.total_size`` elements, of which tensor i is a view at ``layout.offsets[i]``.

    Args:
        layout: where each tensor lies; the same on every rank.
        shapes: global shape of each tensor, in the order of the layout's specs.
        dtype: of the elements.
        device: not meta.

    Memory: none until `materialize`, none after `release`.
    """

    def __init__(
        self,
        layout: ShardLayout,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.shapes = shapes
        self.flat = torch.empty(layout.total_size, dtype=dtype, device=device)
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.size()
        self.views = [self._view(index) for index in range(len(shapes))]
        self.release()

    def _view(self, index: int) -> torch.Tensor:
        shape = self.shapes[index]
        view = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
        offset = self.layout.offsets[index]
        return view.set_(self._storage, offset, shape, contiguous_strides(shape))

    @property
    def is_materialized(self) -> bool:
        """Whether there is memory under the views (a buffer of no elements always is)."""
        return self._storage.size() == self._nbytes

    def materialize(self) -> None:
        """Put memory under the views, uninitialised. Does nothing if it is there."""
        if not self.is_materialized:
            self._storage.resize_(self._nbytes)

    def release(self) -> None:
        """Take the memory away. No collective on it may be in flight."""
        self._storage.resize_(0)

    def gaps(self) -> Iterator[torch.Tensor]:
        """The parts of the flat tensor that belong to no tensor, in order."""
        position = 0
        intervals = zip(self.layout.offsets, self.shapes, strict=True)
        for start, shape in sorted((s, shape) for s, shape in intervals if shape.numel()):
            if start > position:
                yield self.flat[position:start]
            position = start + shape.numel()
        if position < self.layout.total_size:
            yield self.flat[position:]


@contextmanager
def plain_tensors() -> Iterator[None]:
    """No gradients and no inference mode.

    A buffer that is first made while a user validates under ``torch.inference_mode`` would be an
    inference tensor, which the next training step could not save for backward.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
