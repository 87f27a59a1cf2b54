"""KeptCodes: messages of codes that are not decoded.

::

    message k   | scales of a, of c | codes of a, of c |
                          |                |
    scales of a, of c  <--'                '-->  the full face: codes where the elements would be
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale_fsdp.dbuffer.block_codec import BlockCodec, Coding
from vescale_fsdp.planner import ShardLayout

__all__ = ["KeptCodes"]


class KeptCodes(BlockCodec):
    """The codec of a layout of which all tensors are coded, and stay so.

    Args:
        layout: of the group.
        codings: of each tensor.
        device: of the scales.

    Attributes:
        scales: of each tensor, float32, of the shape of its grid of blocks.

    Cost: per message, two copies for each tensor that the rank holds a part of.
    """

    def __init__(
        self, layout: ShardLayout, codings: Sequence[Coding], device: torch.device
    ) -> None:
        super().__init__(layout, codings, torch.uint8)
        self.scales = [
            torch.zeros(each.blocks.grid, dtype=torch.float32, device=device) for each in codings
        ]

    def decode(
        self, layout: ShardLayout, rank: int, message: torch.Tensor, part: torch.Tensor
    ) -> None:
        """Copy the codes of ``rank`` to its ``part`` of the full face, and its scales."""
        plan = self._plan(rank)
        scales = message[: plan.num_scales * 4].view(torch.float32)
        for piece in plan.coded:
            assert piece.coding is not None, "all are coded"
            blocks = piece.coding.blocks
            first, count = blocks.num_blocks(piece.first), blocks.num_blocks(piece.numel)
            own = scales.narrow(0, piece.first_scale, count)
            self.scales[piece.tensor].view(-1).narrow(0, first, count).copy_(own)
            codes = message.narrow(0, piece.byte, piece.numel)
            part.narrow(0, piece.start, piece.numel).copy_(codes)
