"""BlockCodec: sends some tensors of a group as 8-bit codes in blocks, and the others unencoded.

A message has three sections, each of which starts at a multiple of 16 bytes::

    shard    | a a a a a a | b | . | c c c |        a and c are encoded, b is not, `.` is a gap
    message  | scales of a, of c | b | codes of a, of c | unused |

Codes have the order of the elements. All messages have the length of the longest one, because ranks
have different numbers of encoded elements. No block is split between ranks, so each scale is that
of a block of the full tensor, and can be computed from the shard.

Messages for `KeptCodes` are not decoded: codes are copied to the full buffer, in the places of the
elements, and scales to another tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from vescale_fsdp import devices
from vescale_fsdp.dbuffer import codec_launches as launches
from vescale_fsdp.dbuffer import codec_tables as tables
from vescale_fsdp.dbuffer.codec_launches import Received, takes_kernels
from vescale_fsdp.dbuffer.codec_tables import Table
from vescale_fsdp.dbuffer.eight_bits import Coding, decode_blocks, encode_blocks
from vescale_fsdp.planner import ShardLayout
from vescale_fsdp.ragged import Blocks

_ALIGNMENT = 16  # bytes: NCCL falls back to scalar copies below that
_SCALE_BYTES = 4


class Piece(NamedTuple):
    """A rank's part of one tensor."""

    tensor: int  # in the order of the layout's specs
    first: int  # of its elements
    start: int  # in the shard, elements
    numel: int
    coding: Coding | None
    byte: int  # of its codes, or of itself, in the message
    first_scale: int

    @property
    def num_scales(self) -> int:
        assert self.coding is not None, "only what is coded has scales"
        return self.coding.blocks.num_blocks(self.numel)

    def row(self, rank: int) -> tables.Row:
        """Of the table for kernels."""
        if self.coding is None:
            return tables.Row(tables.RAW, rank, self.start, self.numel, self.byte)
        block, matrix = _rectangles(self.coding.blocks, self.numel)
        kind = tables.INT8 if self.coding.dtype == "int8" else tables.E4M3
        place = (rank, self.start, self.numel, self.byte, self.first_scale)
        return tables.Row(kind, *place, block, matrix, self.num_scales)


def _rectangles(blocks: Blocks, numel: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of a block, and of the matrix or matrices that a rank's part is."""
    if blocks.tile is None:
        rows, columns = blocks.size if isinstance(blocks.size, tuple) else (1, blocks.size)
        return (rows, columns), (-(-numel // columns), columns)
    first = blocks.regions(blocks.shape, numel, numel)[0]
    return blocks.tile, (first.shape[0], first.shape[1])


class _Plan(NamedTuple):
    """The places of tensors in the shard and in the message of a rank."""

    coded: list[Piece]
    raw: list[Piece]
    gaps: list[tuple[int, int]]  # start and stop in the shard
    num_scales: int


class BlockCodec:
    """The codec of one layout.

    Args:
        layout: of the group.
        codings: of each tensor, in the order of the layout's specs; None: it is sent as it is.
        raw_dtype: of what is not coded, on the wire.

    Cost: per message, a handful of operators for each tensor that the rank holds a part of. With
    Triton's kernels (see `codec_launches`): one launch, also for the messages of all ranks.
    """

    def __init__(
        self, layout: ShardLayout, codings: Sequence[Coding | None], raw_dtype: torch.dtype
    ) -> None:
        assert len(codings) == len(layout.specs), "one for each tensor"
        self.layout, self.codings, self.raw_dtype = layout, tuple(codings), raw_dtype
        self._plans: dict[int, _Plan] = {}
        self._tables: dict[torch.device, Table | None] = {}

    def num_bytes(self, layout: ShardLayout) -> int:
        """Return the size of a message, that of the rank that needs most."""
        assert layout is self.layout, "a codec is made for one layout"
        return self._num_bytes

    @cached_property
    def _num_bytes(self) -> int:
        sizes = [[0, 0, 0] for _ in range(self.layout.num_shards)]  # of the sections, in bytes
        for index, coding in enumerate(self.codings):
            for rank, start, stop in self.layout.shard_ranges(index):
                if coding is None:
                    sizes[rank][1] += (stop - start) * self.raw_dtype.itemsize
                else:
                    sizes[rank][0] += coding.blocks.num_blocks(stop - start) * _SCALE_BYTES
                    sizes[rank][2] += stop - start
        return max(sum(map(_aligned, sections)) for sections in sizes)

    def encode(
        self, layout: ShardLayout, rank: int, shard: torch.Tensor, message: torch.Tensor
    ) -> None:
        """Write ``shard`` to ``message``; where it rests elsewhere it goes there first."""
        if not devices.is_same(shard, message):
            there = torch.empty(shard.shape, dtype=shard.dtype, device=message.device)
            shard = there.copy_(shard, non_blocking=True)
        table = self._table_for(message.device, shard.dtype)
        if table is not None:
            launches.encode(table, rank, 1, shard, message, self.raw_dtype)
            return
        plan = self._plan(rank)
        scales = message[: plan.num_scales * _SCALE_BYTES].view(torch.float32)
        for piece in plan.coded:
            assert piece.coding is not None, "it is coded"
            numbers = shard.narrow(0, piece.start, piece.numel)
            codes = message.narrow(0, piece.byte, piece.numel)
            own = scales.narrow(0, piece.first_scale, piece.num_scales)
            encode_blocks(piece.coding, numbers, codes, own)
        if plan.raw:
            sources = [shard.narrow(0, piece.start, piece.numel) for piece in plan.raw]
            torch._foreach_copy_(self._raw_parts(plan, message), sources)

    def decode(
        self, layout: ShardLayout, rank: int, message: torch.Tensor, part: torch.Tensor
    ) -> None:
        """Read the message of ``rank`` into its ``part`` of the full buffer; gaps become zero."""
        if self._table_for(part.device, part.dtype) is not None:
            self._read(rank, 1, Received(message, len(message)), part)
            return
        plan = self._plan(rank)
        scales = message[: plan.num_scales * _SCALE_BYTES].view(torch.float32)
        for piece in plan.coded:
            assert piece.coding is not None, "it is coded"
            numbers = part.narrow(0, piece.start, piece.numel)
            codes = message.narrow(0, piece.byte, piece.numel)
            own = scales.narrow(0, piece.first_scale, piece.num_scales)
            decode_blocks(piece.coding, codes, own, numbers)
        if plan.raw:
            targets = [part.narrow(0, piece.start, piece.numel) for piece in plan.raw]
            torch._foreach_copy_(targets, self._raw_parts(plan, message))
        for start, stop in plan.gaps:
            part[start:stop].zero_()

    # Many messages in one launch each, where `is_at_once`

    def is_at_once(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether kernels can read and write the messages on ``device`` of numbers of ``dtype``.

        Cost: the first time on a device, a table is copied to it.
        """
        return self._table_for(device, dtype) is not None

    def encode_all(self, full: torch.Tensor, messages: torch.Tensor) -> None:
        """Write the message of each part of ``full``."""
        table = self._table_for(full.device, full.dtype)
        assert table is not None, "the caller has asked"
        launches.encode(table, 0, self.layout.num_shards, full, messages, self.raw_dtype)

    def decode_all(
        self, messages: torch.Tensor, own: torch.Tensor, first: int, full: torch.Tensor
    ) -> None:
        """Read the messages of all ranks into ``full``; of those from ``first`` on, ``own``."""
        received = Received(messages, self._num_bytes, own, first)
        self._read(0, self.layout.num_shards, received, full)

    def subtract_all(self, messages: torch.Tensor, errors: torch.Tensor) -> None:
        """Subtract what the messages of all ranks say from ``errors``, without inf and NaN."""
        received = Received(messages, self._num_bytes)
        self._read(0, self.layout.num_shards, received, errors, subtracts=True)

    def add_all(self, rank: int, messages: Sequence[torch.Tensor], total: torch.Tensor) -> bool:
        """Write to ``total`` the sum of what all senders have sent to ``rank``, in their order.

        Args:
            messages: of each, those of as many parts as ``rank`` has. Its own may lie elsewhere.

        Returns:
            Whether the others lie one after the other; else nothing is done.
        """
        num_parts = self.layout.num_shards // len(messages)
        if _are_in_a_row(messages):
            received = Received(messages[0], self._num_bytes)
        else:
            others = [*messages[:rank], *messages[rank + 1 :]]
            if not _are_in_a_row(others):
                return False
            first = rank * num_parts
            received = Received(others[0], self._num_bytes, messages[rank], first, left_out=True)
        received = received._replace(num_senders=len(messages))
        self._read(rank * num_parts, num_parts, received, total)
        return True

    def _read(
        self,
        first_rank: int,
        num_ranks: int,
        received: Received,
        numbers: torch.Tensor,
        subtracts: bool = False,
    ) -> None:
        table = self._table_for(numbers.device, numbers.dtype)
        assert table is not None, "the caller has asked"
        launches.decode(
            table, first_rank, num_ranks, received, numbers, self.raw_dtype, subtracts=subtracts
        )

    def _table_for(self, device: torch.device, dtype: torch.dtype) -> Table | None:
        """The table for the kernels; None: they are not for this device, or for this dtype."""
        if device not in self._tables:
            self._tables[device] = self._made_table(device) if takes_kernels(device) else None
        is_known = dtype in tables.DTYPES
        if None in self.codings:
            is_known = is_known and self.raw_dtype in tables.DTYPES
        return self._tables[device] if is_known else None

    def _made_table(self, device: torch.device) -> Table:
        rows: list[tables.Row] = []
        for rank in range(self.layout.num_shards):
            plan = self._plan(rank)
            rows += [self._row(rank, each) for each in (*plan.coded, *plan.raw)]
            rows += [tables.Row(tables.GAP, rank, start, stop - start) for start, stop in plan.gaps]
        return tables.make_table(rows, self.layout.num_shards, device)

    def _row(self, rank: int, piece: Piece) -> tables.Row:
        return piece.row(rank)

    def _raw_parts(self, plan: _Plan, message: torch.Tensor) -> list[torch.Tensor]:
        itemsize = self.raw_dtype.itemsize
        return [
            message.narrow(0, piece.byte, piece.numel * itemsize).view(self.raw_dtype)
            for piece in plan.raw
        ]

    def _plan(self, rank: int) -> _Plan:
        if rank not in self._plans:
            self._plans[rank] = self._made_plan(rank)
        return self._plans[rank]

    def _made_plan(self, rank: int) -> _Plan:
        held = self._held_by(rank)
        coded = [each for each in held if each.coding is not None]
        raw = [each for each in held if each.coding is None]
        num_scales = 0
        for k, piece in enumerate(coded):
            coded[k] = piece._replace(first_scale=num_scales)
            num_scales += piece.num_scales
        byte = _aligned(num_scales * _SCALE_BYTES)
        for pieces, itemsize in ((raw, self.raw_dtype.itemsize), (coded, 1)):
            for k, piece in enumerate(pieces):
                pieces[k] = piece._replace(byte=byte)
                byte += piece.numel * itemsize
            byte = _aligned(byte)
        assert byte <= self._num_bytes, "messages are as long as the longest"
        return _Plan(coded, raw, _gaps(held, self.layout.shard_size), num_scales)

    def _held_by(self, rank: int) -> list[Piece]:
        """What a rank holds, in order, without its place in the message."""
        layout = self.layout
        found = []
        for index in layout.order:
            start, stop = layout.local_range(index, rank)
            if stop > start:
                place = layout.offsets[index] + start - rank * layout.shard_size
                found.append(Piece(index, start, place, stop - start, self.codings[index], 0, 0))
        return found


def _are_in_a_row(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether flat tensors of one size are adjacent in memory, in this order."""
    first, step = tensors[0].data_ptr(), tensors[0].nbytes
    return all(each.data_ptr() == first + k * step for k, each in enumerate(tensors))


def _gaps(held: list[Piece], size: int) -> list[tuple[int, int]]:
    ends = [0, *(piece.start + piece.numel for piece in held)]
    starts = [*(piece.start for piece in held), size]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


_SCALES_ALIGNMENT = (
    128  # scales: products of codes on CUDA want theirs from a multiple of some bytes on
)


class KeptCodes(BlockCodec):
    """The codec of a layout of which all tensors are coded, and stay so.

    Args:
        layout: of the group.
        codings: of each tensor.
        device: of the scales.

    Attributes:
        scales: of each tensor, float32, of the shape of its grid of blocks.

    Cost: per message, two copies for each tensor that the rank holds a part of. With Triton's
    kernels (see `codec_launches`): one launch, also for the messages of all ranks.
    """

    def __init__(
        self, layout: ShardLayout, codings: Sequence[Coding], device: torch.device
    ) -> None:
        super().__init__(layout, codings, torch.uint8)
        counts = [math.prod(each.blocks.grid) for each in codings]
        aligned = [-(-count // _SCALES_ALIGNMENT) * _SCALES_ALIGNMENT for count in counts]
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
            self._read(rank, 1, Received(message, len(message)), part)
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
        received: Received,
        numbers: torch.Tensor,
        subtracts: bool = False,
    ) -> None:
        assert not subtracts, "these are codes"
        table = self._table_for(numbers.device, torch.float32)
        assert table is not None, "the caller has asked"
        scales = self._all_scales
        launches.decode(
            table, first_rank, num_ranks, received, numbers, torch.float32, kept_scales=scales
        )

    def _row(self, rank: int, piece: Piece) -> tables.Row:
        assert piece.coding is not None, "all are coded"
        first = self._starts[piece.tensor] + piece.coding.blocks.num_blocks(piece.first)
        return super()._row(rank, piece)._replace(kept_scale=first)
