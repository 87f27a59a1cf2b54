"""FlatBuffer: a flat tensor over all shards of a group, whose memory comes and goes.

Views of it are made once, over one `Region` of memory: autograd saves them in forward, and finds
the data there again in backward. They are made with ``set_``, so each has a version counter of
its own; an asynchronous collective bumps the counter of the flat tensor from its own thread,
after the call has returned, and must not invalidate what autograd saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from vescale_fsdp import compat, devices
from vescale_fsdp.dbuffer.memory import make_region
from vescale_fsdp.planner import ShardLayout
from vescale_fsdp.ragged import contiguous_strides


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
        self.region = make_region(layout.total_size * dtype.itemsize, device)
        self.region.materialize()  # ``set_`` checks bounds
        self.flat = self._view(dtype, device, 0, (layout.total_size,))
        self.views = [
            self._view(dtype, device, offset, shape)
            for offset, shape in zip(layout.offsets, shapes, strict=True)
        ]
        self.release()

    def _view(
        self, dtype: torch.dtype, device: torch.device, offset: int, shape: Sequence[int]
    ) -> torch.Tensor:
        view = torch.empty(0, dtype=dtype, device=device)
        return view.set_(self.region.storage, offset, tuple(shape), contiguous_strides(shape))

    @property
    def is_materialized(self) -> bool:
        """Whether there is memory under the views."""
        return self.region.is_materialized

    def materialize(self, within: AbstractContextManager[None] | None = None) -> None:
        """Put memory under the views, uninitialised. Does nothing if it is there.

        Args:
            within: a context in which to allocate it. Default: `devices.private_memory`.
        """
        if not self.is_materialized:
            with within or devices.private_memory(self.flat.device):
                self.region.materialize()

    def release(self) -> None:
        """Take the memory away. No collective on it may be in flight."""
        self.region.release()


class plain_tensors:
    """No gradients, no inference mode, and none of ``torch.func``'s transformations.

    A buffer that is first made while a user validates under ``torch.inference_mode`` would be an
    inference tensor, which the next training step could not save for backward.
    """

    # Entered several times for each unit of a step. As a generator, and leaving an inference mode
    # that nobody has entered, it took 14 us.
    __slots__ = ("_functorch", "_had_gradients", "_inference")

    def __enter__(self) -> None:
        self._functorch = compat.outside_functorch()
        self._functorch.__enter__()
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._had_gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch.set_grad_enabled(self._had_gradients)
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
        self._functorch.__exit__(None, None, None)
