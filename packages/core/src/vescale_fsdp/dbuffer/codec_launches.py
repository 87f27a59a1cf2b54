"""Launches of the kernels of `codec_kernels`, which find their work in a table of `codec_tables`.

A launch goes to the current device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vescale_fsdp import devices
from vescale_fsdp.dbuffer.codec_tables import Table


def encode(
    table: Table,
    first_rank: int,
    num_ranks: int,
    numbers: torch.Tensor,
    messages: torch.Tensor,
    raw_dtype: torch.dtype,
) -> None:
    """Write the messages of consecutive ranks.

    Args:
        numbers: their shards, flat.
        messages: uint8, as many, one after the other.

    Cost: one launch.
    """
    from vescale_fsdp.dbuffer import codec_kernels as kernels  # imports Triton

    grid = _grid(table, first_rank, num_ranks)
    blocks, rows, columns = table.shape
    with devices.made_current(messages.device):
        kernels.encode_kernel[grid](
            table.rows,
            table.piece_of,
            table.first_program[first_rank],
            first_rank,
            numbers,
            numbers.numel() // num_ranks,
            messages,
            messages.numel() // num_ranks,
            RAW=_in_triton(raw_dtype),
            BLOCKS=blocks,
            ROWS=rows,
            COLUMNS=columns,
            **kernels.OPTIONS,
        )


class Mail(NamedTuple):
    """Messages to be read: sender by sender, and of each sender rank by rank.

    Some of them may lie elsewhere, and are then left out of the others or not read there.
    """

    messages: torch.Tensor  # uint8
    size: int  # of a message
    own: torch.Tensor | None = None  # those that lie elsewhere
    own_first: int = 0  # which these are, counted over all senders
    left_out: bool = False
    num_senders: int = 1


def decode(
    table: Table,
    first_rank: int,
    num_ranks: int,
    mail: Mail,
    numbers: torch.Tensor,
    raw_dtype: torch.dtype,
    *,
    subtracts: bool = False,
    kept_scales: torch.Tensor | None = None,
) -> None:
    """Read the messages for consecutive ranks, and add those of several senders in order.

    Args:
        numbers: the parts of the full buffer that are these ranks', flat.
        subtracts: from what is in ``numbers``, which is float32; what is not finite then is 0.
        kept_scales: codes stay codes, and scales go here.

    Cost: one launch.
    """
    from vescale_fsdp.dbuffer import codec_kernels as kernels  # imports Triton

    grid = _grid(table, first_rank, num_ranks)
    blocks, rows, columns = table.shape
    num_own = 0 if mail.own is None else mail.own.numel() // mail.size
    with devices.made_current(numbers.device):
        kernels.decode_kernel[grid](
            table.rows,
            table.piece_of,
            table.first_program[first_rank],
            first_rank,
            num_ranks,
            mail.messages,
            mail.messages if mail.own is None else mail.own,
            mail.own_first,
            mail.own_first + num_own,
            num_own if mail.left_out else 0,
            mail.size,
            mail.num_senders,
            numbers,
            numbers.numel() // num_ranks,
            table.rows if kept_scales is None else kept_scales,  # not read if there are none
            RAW=_in_triton(raw_dtype),
            KEEPS=kept_scales is not None,
            SUBTRACTS=subtracts,
            BLOCKS=blocks,
            ROWS=rows,
            COLUMNS=columns,
            **kernels.OPTIONS,
        )


def _grid(table: Table, first_rank: int, num_ranks: int) -> tuple[int]:
    first = table.first_program[first_rank]
    return (table.first_program[first_rank + num_ranks] - first,)


def _in_triton(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)
