"""Launches the kernels of `codec_kernels`, and decides whether a device uses them.

The kernels get a table of `codec_tables`. A launch uses the current device.

``VESCALE_FSDP_CODEC=auto|torch|triton`` chooses how a `BlockCodec` encodes and decodes messages. It
is read at the first use of a device. ``auto`` (the default) uses the kernels on CUDA if Triton can
be imported and the kernels pass a small test on the device; ``torch`` never uses them; ``triton``
always does. On a CPU they run only in Triton's interpreter (``TRITON_INTERPRET=1``), for tests. The
results are bitwise equal, so ranks may choose differently.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import Any, NamedTuple

import torch

from vescale_fsdp import devices
from vescale_fsdp.dbuffer import codec_tables as tables
from vescale_fsdp.dbuffer import eight_bits


def encode(
    table: tables.Table,
    first_rank: int,
    num_ranks: int,
    numbers: torch.Tensor,
    messages: torch.Tensor,
    raw_dtype: torch.dtype,
) -> None:
    """Encode the messages of consecutive ranks.

    Args:
        numbers: the ranks' shards, flat.
        messages: their messages, uint8, one after the other.

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


class Received(NamedTuple):
    """Messages to decode: in the order of senders, and for each sender in the order of ranks.

    Some of them may be in another tensor, ``own``. They are then missing in ``messages``, or not
    read there.
    """

    messages: torch.Tensor  # uint8
    size: int  # of a message
    own: torch.Tensor | None = None  # those that lie elsewhere
    own_first: int = 0  # which these are, counted over all senders
    left_out: bool = False
    num_senders: int = 1


def decode(
    table: tables.Table,
    first_rank: int,
    num_ranks: int,
    received: Received,
    numbers: torch.Tensor,
    raw_dtype: torch.dtype,
    *,
    subtracts: bool = False,
    kept_scales: torch.Tensor | None = None,
) -> None:
    """Decode the messages for consecutive ranks, and add those of several senders in order.

    Args:
        numbers: the ranks' parts of the full buffer, flat.
        subtracts: subtract from ``numbers``, which are float32. A result that is not finite is 0.
        kept_scales: codes are not decoded, and their scales are written here.

    Cost: one launch.
    """
    from vescale_fsdp.dbuffer import codec_kernels as kernels  # imports Triton

    grid = _grid(table, first_rank, num_ranks)
    blocks, rows, columns = table.shape
    num_own = 0 if received.own is None else received.own.numel() // received.size
    with devices.made_current(numbers.device):
        kernels.decode_kernel[grid](
            table.rows,
            table.piece_of,
            table.first_program[first_rank],
            first_rank,
            num_ranks,
            received.messages,
            received.messages if received.own is None else received.own,
            received.own_first,
            received.own_first + num_own,
            num_own if received.left_out else 0,
            received.size,
            received.num_senders,
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


def _grid(table: tables.Table, first_rank: int, num_ranks: int) -> tuple[int]:
    first = table.first_program[first_rank]
    return (table.first_program[first_rank + num_ranks] - first,)


def _in_triton(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)


_LOG = logging.getLogger(__name__)


def takes_kernels(device: torch.device) -> bool:
    """Whether the kernels handle messages on ``device``.

    Raises:
        ValueError: the variable has an unknown value.
        RuntimeError: it is ``triton``, but Triton is not installed.
    """
    choice = os.environ.get("VESCALE_FSDP_CODEC", "auto")
    if choice not in ("auto", "torch", "triton"):
        raise ValueError(f"VESCALE_FSDP_CODEC must be auto, torch or triton, got {choice!r}")
    if choice == "torch" or device.type == "meta":
        return False
    is_there = importlib.util.find_spec("triton") is not None
    if choice == "auto":
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        return is_nvidia and is_there and _passes(device)
    if not is_there:
        raise RuntimeError("VESCALE_FSDP_CODEC=triton, but triton is not installed: install it")
    return True


@functools.cache
def _passes(device: torch.device) -> bool:
    """Whether the kernels work on ``device``, with the same results as torch's operators.

    Cost: once for each device; some seconds if the kernels are compiled for the first time.
    """
    try:
        is_right = _are_bits_equal(device)
    except Exception as error:  # noqa: BLE001  # of a compiler, a driver, or who knows whom
        _LOG.warning("Triton's kernels do not run on %s, torch's operators do: %s", device, error)
        return False
    if not is_right:
        _LOG.warning("Triton's kernels write other bits on %s: torch's operators are used", device)
    return is_right


def _are_bits_equal(device: torch.device) -> bool:
    """Compare the results for a message of 3 blocks, 4 tiles and 10 plain numbers."""
    # In bytes: 7 scales (28, to 48), 10 numbers in bfloat16 (20, to 80), 80 codes, 60 codes.
    pieces = [
        tables.Row(tables.INT8, 0, 0, 80, 80, 0, (1, 32), (3, 32), 3),
        tables.Row(tables.E4M3, 0, 80, 60, 160, 3, (4, 5), (6, 10), 4),
        tables.Row(tables.RAW, 0, 140, 10, 48),
        tables.Row(tables.GAP, 0, 150, 10),
    ]
    table = tables.make_table(pieces, 1, device)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(160, generator=generator) * torch.logspace(-14, 8, 160)
    numbers[79] = torch.inf
    numbers = numbers.to(device)
    found = torch.zeros(224, dtype=torch.uint8, device=device)
    expected = torch.zeros_like(found)
    encode(table, 0, 1, numbers, found, torch.bfloat16)
    scales = expected[:28].view(torch.float32)
    matrix = numbers[80:140].view(6, 10)
    eight_bits.encode(numbers[:80], "int8", 32, expected[80:160], scales[:3])
    eight_bits.encode(matrix, "e4m3", (4, 5), expected[160:220], scales[3:])
    expected[48:68].view(torch.bfloat16).copy_(numbers[140:150])
    if not torch.equal(found, expected):
        return False
    values = torch.zeros(160, device=device)
    eight_bits.decode(expected[80:160], "int8", 32, scales[:3], values[:80])
    eight_bits.decode(expected[160:220], "e4m3", (4, 5), scales[3:], values[80:140].view(6, 10))
    values[140:150] = expected[48:68].view(torch.bfloat16)
    read, errors = torch.ones_like(values), numbers.clone()
    received = Received(found, len(found))
    decode(table, 0, 1, received, read, torch.bfloat16)
    decode(table, 0, 1, received, errors, torch.bfloat16, subtracts=True)
    lost = (numbers - values).nan_to_num_(0.0, 0.0, 0.0)
    return torch.equal(read.nan_to_num(7.0), values.nan_to_num(7.0)) and torch.equal(errors, lost)
