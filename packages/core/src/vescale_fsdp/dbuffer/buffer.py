"""DBuffer: the parameters of a group, as a permanent shard and a temporary full buffer.

Three tensors A, B, C in a group of two ranks, shards of S elements::

                 0                 S                2S
    full         | A A A A A B B B | B B C C C C . . |     exists between all-gather and reshard
    shard, rank 0| A A A A A B B B |                       exists always
    shard, rank 1                  | B B C C C C . . |     exists always; `.` is a gap, and zero

An all-gather writes the full buffer (a `FlatBuffer`) from the shards of all
ranks. The parameters are views of it at planned offsets, so nothing is copied out. The two may
differ in dtype (fp32 master weights, bf16 compute).

Views of a `FlatBuffer` are made once, over one `Region` of memory: autograd saves them in forward,
and finds the data there again in backward. They are made with ``set_``, so each has a version
counter of its own; an asynchronous collective bumps the counter of the flat tensor from its own
thread, after the call has returned, and must not invalidate what autograd saved.

Source: arXiv 2602.22437, section on DBuffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from vescale_fsdp import compat, devices
from vescale_fsdp.dbuffer.memory import Borrowed, Region, is_checked, make_region
from vescale_fsdp.planner import ShardLayout
from vescale_fsdp.ragged import contiguous_strides


class FlatBuffer:
    """``layout.total_size`` elements, of which tensor i is a view at ``layout.offsets[i]``.

    Args:
        layout: the place of each tensor; the same on every rank.
        shapes: global shape of each tensor, in the order of the layout's specs.
        dtype: of the elements.
        device: not meta.
        within: a flat tensor of as many elements, if the buffer is its memory.
        keeps: `release` keeps the memory for the next time, on the CPU.

    Memory: none until `materialize`, none after `release`.
    """

    def __init__(
        self,
        layout: ShardLayout,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        *,
        within: torch.Tensor | None = None,
        keeps: bool = False,
    ) -> None:
        self.layout = layout
        self.shapes = shapes
        self.region: Region
        if within is not None:
            self.region, start = Borrowed(within), int(within.storage_offset())
        else:
            start = 0
            self.region = make_region(layout.total_size * dtype.itemsize, device, keeps=keeps)
        self.region.materialize()  # ``set_`` checks bounds
        self.flat = self._view(dtype, device, start, (layout.total_size,))
        self.views = [
            self._view(dtype, device, start + offset, shape)
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
        """Allocate memory for the views, uninitialised. Does nothing if there is memory.

        Args:
            within: a context in which to allocate it.
        """
        if not self.is_materialized:
            with within or nullcontext():
                self.region.materialize()

    def release(self, *, keeps: bool = False) -> None:
        """Free the memory. No collective may use it at this time.

        Args:
            keeps: count as freed, but leave the memory where it is, for the next `materialize`.
        """
        self.region.release(keeps=keeps)


class plain_tensors:
    """A context without gradients, inference mode and ``torch.func``'s transformations.

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


class DBuffer:
    """The parameter memory of one group on one rank.

    Args:
        layout: the place of each tensor; the same on every rank.
        shapes: global shape of each tensor, in the order of the layout's specs.
        rank: this rank along the sharded axis.
        shard_dtype: of the shard, ``layout.shard_size`` elements.
        full_dtype: of the full buffer, ``layout.total_size`` elements.
        face_dtype: of what the full buffer holds in place of these (codes); default:
            ``full_dtype``.
        device: of the shard. On meta there is a shard and no full buffer.
        full_device: of the full buffer, if the shard is elsewhere (CPU offload).
        pin_memory: of a shard on the CPU, so that copies to an accelerator are asynchronous.
        keeps_full: the full buffer keeps its memory for the next all-gather (on the CPU).
        is_one: the full buffer is the shard, which is the only one and has its dtype and device.
            Then there is one copy of the parameters, and nothing to gather.
    """

    def __init__(
        self,
        layout: ShardLayout,
        shapes: Sequence[torch.Size],
        rank: int,
        *,
        shard_dtype: torch.dtype,
        full_dtype: torch.dtype,
        device: torch.device,
        full_device: torch.device | None = None,
        face_dtype: torch.dtype | None = None,
        pin_memory: bool = False,
        keeps_full: bool = False,
        is_one: bool = False,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.shard = devices.empty(layout.shard_size, shard_dtype, device, pins=pin_memory).zero_()
        self._shapes, self._face_dtype = shapes, face_dtype
        self._full_device, self._keeps_full = full_device or device, keeps_full
        self.make_full(full_dtype, is_one=is_one)

    def make_full(self, dtype: torch.dtype, *, is_one: bool) -> None:
        """Make the full buffer, without memory; anew if there is one, which must be released.

        Args:
            dtype, is_one: as of the class.
        """
        self.full_dtype = dtype
        self.full_face: FlatBuffer | None = None
        self.is_one = is_one and not is_checked()  # what is checked is that memory was freed
        if self.shard.device.type != "meta":
            self.full_face = FlatBuffer(
                self.layout,
                self._shapes,
                self._face_dtype or dtype,
                self._full_device,
                within=self.shard if self.is_one else None,
                keeps=self._keeps_full,
            )

    @property
    def full(self) -> FlatBuffer:
        """The full buffer."""
        assert self.full_face is not None, "checked before the first gather: not on meta"
        return self.full_face

    def own_slice(self) -> torch.Tensor:
        """This rank's part of the full buffer, the position of its shard."""
        size = self.layout.shard_size
        return self.full.flat[self.rank * size : (self.rank + 1) * size]

    def part(self, num_parts: int) -> torch.Tensor:
        """Return this rank's part of the full buffer, one of ``num_parts`` equal parts.

        Ranks 0 to ``num_parts - 1`` have the parts in order, and so do the next ``num_parts``.
        """
        size = self.layout.total_size // num_parts
        place = self.rank % num_parts
        return self.full.flat[place * size : (place + 1) * size]

    def shard_views(self) -> list[torch.Tensor]:
        """Return this rank's flat part of each tensor, as views of the shard."""
        indices = range(len(self.layout.offsets))
        return [shard_view(self.layout, self.rank, self.shard, index) for index in indices]


class ParameterBuffer(Protocol):
    """The properties of a parameter buffer that gradients need. `DBuffer` has them."""

    @property
    def layout(self) -> ShardLayout:
        """The layout of the tensors."""

    @property
    def rank(self) -> int:
        """This rank's index along the axis that shards."""

    @property
    def shard(self) -> torch.Tensor:
        """A tensor with the device and dtype of sharded parameters and gradients."""

    @property
    def full_dtype(self) -> torch.dtype:
        """The dtype of unsharded parameters, and so of autograd's gradients."""


def shard_view(layout: ShardLayout, rank: int, shard: torch.Tensor, index: int) -> torch.Tensor:
    """Tensor ``index``'s flat part in ``shard``, of ``layout.shard_size`` elements.

    Where the rank holds nothing of the tensor, an empty view at the start of the shard. The view
    has a version counter of its own (see `FlatBuffer`).
    """
    start, stop = layout.local_range(index, rank)
    offset = layout.offsets[index] + start - rank * layout.shard_size if stop > start else 0
    view = torch.empty(0, dtype=shard.dtype, device=shard.device)
    return view.set_(
        shard.untyped_storage(), shard.storage_offset() + offset, (stop - start,), (1,)
    )
