"""KeptCodes: messages of codes that are not decoded.

::

    message k   | scales of a, of c | codes of a, of c |
                          |                |
    scales of a, of c  <--'                '-->  the full face: codes where the elements would be
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from vescale_fsdp.dbuffer import codec_launches as launches
from vescale_fsdp.dbuffer import codec_tables as tables
from vescale_fsdp.dbuffer.block_codec import BlockCodec, Coding, Piece
from vescale_fsdp.dbuffer.codec_launches import Mail
from vescale_fsdp.planner import ShardLayout

_ALIGNMENT = 128  # scales: products of codes on CUDA want theirs from a multiple of some bytes on


class KeptCodes(BlockCodec):
    """The codec of a layout of which all tensors are coded, and stay so.

    Args:
        layout: of the group.
        codings: of each tensor.
        device: of the scales.

    Attributes:
        scales: of each tensor, float32, of the shape of its grid of blocks.

    Cost: per message, two copies for each tensor that the rank holds a part of. With Triton's
    kernels (see `codec_choice`): one launch, also for the messages of all ranks.
    """

    def __init__(
        self, layout: ShardLayout, codings: Sequence[Coding], device: torch.device
    ) -> None:
        super().__init__(layout, codings, torch.uint8)
        counts = [math.prod(each.blocks.grid) for each in codings]
        aligned = [-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts]
        self._starts = [sum(aligned[:k]) for k in range(len(aligned))]
        self._all_scales = torch.zeros(sum(aligned), dtype=torch.float32, device=device)
        self.scales = [
            self._all_scales.narrow(0, start, count).view(each.blocks.grid)
            for start, count, each in zip(self._starts, counts, codings, strict=True)
        ]

    def decode(
        self, layout: ShardLayout, rank: int, message: torch.Tensor, part: torch.Tensor
    ) -> None:
        """Copy the codes of ``rank`` to its ``part`` of the full face, and its scales."""
        if self.is_at_once(part.device, part.dtype):
            self._read(rank, 1, Mail(message, len(message)), part)
            return
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

    def is_at_once(self, device: torch.device, dtype: torch.dtype) -> bool:
        """As of a `BlockCodec`; what is read are codes."""
        return self._table_for(device, torch.float32) is not None

    def _read(
        self,
        first_rank: int,
        num_ranks: int,
        mail: Mail,
        numbers: torch.Tensor,
        subtracts: bool = False,
    ) -> None:
        assert not subtracts, "these are codes"
        table = self._table_for(numbers.device, torch.float32)
        assert table is not None, "the caller has asked"
        scales = self._all_scales
        launches.decode(
            table, first_rank, num_ranks, mail, numbers, torch.float32, kept_scales=scales
        )

    def _row(self, rank: int, piece: Piece) -> tables.Row:
        assert piece.coding is not None, "all are coded"
        first = self._starts[piece.tensor] + piece.coding.blocks.num_blocks(piece.first)
        return super()._row(rank, piece)._replace(kept_scale=first)
