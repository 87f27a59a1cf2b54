"""Tables for the kernels of `codec_kernels`, so that one launch handles many messages.

With torch's operators, a message needs a dozen of them for each tensor of which a rank has a part;
for 64 ranks this takes milliseconds of host time. The kernels read a table on the device instead.
It has a row for each piece and each gap, rank by rank. A second list has the row of each program of
a launch: 4 bytes for every 2,048 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# What a row is of.
GAP, RAW, INT8, E4M3 = 0, 1, 2, 3
# The numbers of a row, as the kernels read them: kind, first program, rank, start, numel, byte,
# first scale, rows and columns of a block, columns and rows of a matrix, blocks in a row of them,
# blocks of a matrix, blocks, place of the kept scales.
WIDTH = 16
_AT_ONCE = 2048  # numbers of a program: 16 for each thread

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that the kernels know


class Row(NamedTuple):
    """A rank's part of one tensor, or a gap.

    Blocks are tiles of one or more matrices. Flat ones are rows of a matrix that is as wide as they
    are, of which the last may have less.
    """

    kind: int
    rank: int
    start: int  # in the shard, elements
    numel: int
    byte: int = 0  # of its codes, or of itself, in the message
    first_scale: int = 0
    block: tuple[int, int] = (1, 1)  # rows and columns
    matrix: tuple[int, int] = (1, 1)
    num_blocks: int = 0
    kept_scale: int = 0  # where the scales of codes that stay codes go


class Table(NamedTuple):
    """The pieces of all ranks on a device."""

    rows: torch.Tensor  # int64, [pieces, WIDTH]
    piece_of: torch.Tensor  # int32: the row of each program
    first_program: list[int]  # of each rank, and the number of programs
    shape: tuple[int, int, int]  # blocks, rows and columns that a program handles at once


def make_table(pieces: Sequence[Row], num_ranks: int, device: torch.device) -> Table:
    """The table of ``pieces``, which are in the order of their ranks.

    Cost: two copies to the device, for which the host waits.
    """
    blocks, rows, columns = shape = _shape([piece.block for piece in pieces if piece.num_blocks])
    table: list[list[int]] = []
    counts: list[int] = []
    num_programs = 0
    first_program = [0] * (num_ranks + 1)
    for piece in pieces:
        if piece.num_blocks:
            count = -(-piece.num_blocks // blocks)
        else:
            count = -(-piece.numel // (blocks * rows * columns))
        in_row = -(-piece.matrix[1] // piece.block[1])
        in_matrix = -(-piece.matrix[0] // piece.block[0]) * in_row
        row = [piece.kind, num_programs, piece.rank, piece.start, piece.numel, piece.byte]
        row += [piece.first_scale, *piece.block, piece.matrix[1], piece.matrix[0]]
        row += [in_row, in_matrix, piece.num_blocks, piece.kept_scale]
        table.append(row + [0] * (WIDTH - len(row)))
        counts.append(count)
        num_programs += count
        first_program[piece.rank + 1] += count
    for rank in range(num_ranks):
        first_program[rank + 1] += first_program[rank]
    piece_of = torch.arange(len(pieces), dtype=torch.int32)
    return Table(
        torch.tensor(table, dtype=torch.int64).view(-1, WIDTH).to(device),
        piece_of.repeat_interleave(torch.tensor(counts, dtype=torch.int64)).to(device),
        first_program,
        shape,
    )


def _shape(sizes: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Blocks, rows and columns that a program handles at once: powers of two, as Triton wants."""
    columns = min(_power_of_two(max((size[1] for size in sizes), default=1)), _AT_ONCE)
    rows = min(_power_of_two(max((size[0] for size in sizes), default=1)), _AT_ONCE // columns)
    return _AT_ONCE // columns // rows, rows, columns


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
