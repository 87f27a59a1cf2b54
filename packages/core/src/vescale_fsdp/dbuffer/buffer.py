"""DBuffer: the parameters of a group, with a shard that rests and a full face that comes and goes.

Three tensors A, B, C in a group of two ranks, shards of S elements::

                 0                 S                2S
    full         | A A A A A B B B | B B C C C C . . |     exists between gather and release
    shard, rank 0| A A A A A B B B |                       exists always
    shard, rank 1                  | B B C C C C . . |     exists always; `.` is a gap, and zero

A gather writes the full face from the shards of all ranks. The parameters are views of the full
face at planned offsets, so nothing is copied out. The two faces may differ in dtype (fp32 master
weights, bf16 compute).

Source: arXiv 2602.22437, section on DBuffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale_fsdp import devices
from vescale_fsdp.dbuffer.flat import FlatBuffer
from vescale_fsdp.planner import ShardLayout


class DBuffer:
    """The parameter memory of one group on one rank.

    Args:
        layout: where each tensor lies; the same on every rank.
        shapes: global shape of each tensor, in the order of the layout's specs.
        rank: this rank along the sharded axis.
        shard_dtype: of the resting shard, ``layout.shard_size`` elements.
        full_dtype: of the full face, ``layout.total_size`` elements.
        face_dtype: of what the full face holds in place of these (codes); default: ``full_dtype``.
        device: of the shard. On meta there is a shard and no full face.
        full_device: of the full face, if the shard rests elsewhere (CPU offload).
        pin_memory: of a shard on the CPU, so that copies to an accelerator are asynchronous.
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
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.full_dtype = full_dtype
        self.shard = devices.empty(layout.shard_size, shard_dtype, device, pins=pin_memory).zero_()
        self.full_face = (
            None
            if device.type == "meta"
            else FlatBuffer(layout, shapes, face_dtype or full_dtype, full_device or device)
        )

    @property
    def full(self) -> FlatBuffer:
        """The full face."""
        assert self.full_face is not None, "checked before the first gather: not on meta"
        return self.full_face

    def own_slice(self) -> torch.Tensor:
        """This rank's part of the full face: where its shard lies in the gathered buffer."""
        size = self.layout.shard_size
        return self.full.flat[self.rank * size : (self.rank + 1) * size]

    def part(self, num_parts: int) -> torch.Tensor:
        """One of ``num_parts`` equal parts of the full face, by this rank's place among them.

        Ranks 0 to ``num_parts - 1`` hold the parts in order, and so do the next ``num_parts``.
        """
        size = self.layout.total_size // num_parts
        place = self.rank % num_parts
        return self.full.flat[place * size : (place + 1) * size]

    def shard_views(self) -> list[torch.Tensor]:
        """This rank's flat part of each tensor, as views of the resting shard."""
        indices = range(len(self.layout.offsets))
        return [shard_view(self.layout, self.rank, self.shard, index) for index in indices]


def shard_view(layout: ShardLayout, rank: int, shard: torch.Tensor, index: int) -> torch.Tensor:
    """Tensor ``index``'s flat part in ``shard``, of ``layout.shard_size`` elements.

    Where the rank holds nothing of the tensor, an empty view at the start of the shard. The view
    has a version counter of its own (see `flat`).
    """
    start, stop = layout.local_range(index, rank)
    offset = layout.offsets[index] + start - rank * layout.shard_size if stop > start else 0
    view = torch.empty(0, dtype=shard.dtype, device=shard.device)
    return view.set_(
        shard.untyped_storage(), shard.storage_offset() + offset, (stop - start,), (1,)
    )
