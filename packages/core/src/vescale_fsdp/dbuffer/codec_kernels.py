"""The block codec as two Triton kernels. One launch encodes or decodes any number of messages.

This module is imported only when it is used (see `codec_launches`); no other module needs Triton. A
program of a launch finds its row in the table, and handles a few complete blocks of this piece, or
some numbers of a piece that is not encoded::

    programs    0   1   2   3   4   5   6   7            rank 0: a, a gap; rank 1: a, b
    piece_of    0   0   0   1   2   2   3   3            rows of the table

Codes, scales and numbers are bitwise those of `eight_bits`, for these reasons:

* Divisions use ``div_rn``, which rounds correctly; ``/`` is approximate in Triton.
* The largest magnitude is found with the bits as integers. There NaN > infinity > all others, and
  the result does not depend on the order.
* Numbers are rounded to integers, ties to even, by adding 1.5 * 2**23, where the last place of
  float32 is 1. For e4m3 and bfloat16 they are rounded with integer operations. So results are the
  same on devices without these conversions, and in the interpreter, which truncates.
* A product is rounded before it is added to something: `OPTIONS` disables fused multiply-add.

The bits of a NaN may differ; torch's own operators write different ones on a CPU and on CUDA.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vescale_fsdp.dbuffer import codec_tables as tables

# Of a launch. The compiler would else make one operation of a product and a sum.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

_WIDTH = tl.constexpr(tables.WIDTH)
_RAW = tl.constexpr(tables.RAW)
_INT8 = tl.constexpr(tables.INT8)
_E4M3 = tl.constexpr(tables.E4M3)

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 but its sign
_INFINITY = tl.constexpr(0x7F800000)  # as bits; those of NaN are greater
_NAN = tl.constexpr(0x7FC00000)
_SMALLEST = tl.constexpr(1e-12)
_TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: beside it, float32 has whole numbers only
_TO_512TH = tl.constexpr(16384.0)  # 2**14: beside it, float32 has multiples of 2**-9 only
_BITS_OF_TO_512TH = tl.constexpr(0x46800000)
_LEAST_NORMAL = tl.constexpr(0x3C800000)  # 2**-6, the least normal number of e4m3


# Conversions


@triton.jit
def _bits(values):
    return values.to(tl.uint32, bitcast=True)


@triton.jit
def _wide(numbers):
    """Numbers as float32, exactly."""
    if numbers.dtype == tl.bfloat16:
        upper = numbers.to(tl.uint16, bitcast=True).to(tl.uint32)
        return (upper << 16).to(tl.float32, bitcast=True)
    return numbers.to(tl.float32)


@triton.jit
def _narrow(values, DTYPE: tl.constexpr):
    """Float32 in another dtype, rounded to the nearest, ties to even."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300  # Triton's order
        bits = _bits(values)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = tl.where((bits & _MAGNITUDE) > _INFINITY, 0x7FC0, rounded)
        return upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(DTYPE)


@triton.jit
def _code_of_int8(scaled):
    """The byte of the nearest whole number, for magnitudes below 2**22."""
    return (_bits(scaled + _TO_WHOLE) & 0xFF).to(tl.uint8)


@triton.jit
def _code_of_e4m3(scaled):
    """The byte of the nearest number of e4m3, for magnitudes up to 448.

    The exponent's bias is 7, and 127 in float32: 120 less. Four bits follow it in float32 for each
    one in e4m3 (23 and 3), so 20 are rounded away.
    """
    bits = _bits(scaled)
    magnitude = bits & _MAGNITUDE
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = _bits(magnitude.to(tl.float32, bitcast=True) + _TO_512TH) - _BITS_OF_TO_512TH
    code = tl.where(magnitude < _LEAST_NORMAL, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _number_of_int8(code):
    return code.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _number_of_e4m3(code):
    wide = code.to(tl.uint32)
    magnitude = wide & 0x7F
    subnormal = _bits(magnitude.to(tl.float32) * 0.001953125)  # 2**-9
    bits = tl.where(magnitude < 8, subnormal, (magnitude << 20) + (120 << 23))
    bits = tl.where(magnitude == 0x7F, _NAN, bits)
    return (bits | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


# Places


@triton.jit
def _row_of(rows, piece_of, first_program):
    """The row of this program in the table, and the program's place among those of the row."""
    program = first_program + tl.program_id(0)
    row = rows + tl.load(piece_of + program).to(tl.int64) * _WIDTH
    return row, program - tl.load(row + 1)


@triton.jit
def _blocks_of(row, index, BLOCKS: tl.constexpr):
    """The blocks of program ``index`` of a row.

    Returns, all [blocks]: their places among the blocks of the piece; whether there is such a
    block; its first element in the piece; its rows and columns, which at an edge are fewer.
    """
    height, width = tl.load(row + 7), tl.load(row + 8)
    columns, matrix_rows = tl.load(row + 9), tl.load(row + 10)
    in_row, in_matrix = tl.load(row + 11), tl.load(row + 12)
    block = index * BLOCKS + tl.arange(0, BLOCKS)
    is_there = block < tl.load(row + 13)
    matrix, place = block // in_matrix, block % in_matrix
    down, across = place // in_row * height, place % in_row * width
    first = (matrix * matrix_rows + down) * columns + across
    num_rows = tl.where(is_there, tl.minimum(height, matrix_rows - down), 0)
    return block, is_there, first, num_rows, tl.minimum(width, columns - across)


@triton.jit
def _elements_of(
    first, num_rows, num_columns, columns, numel, y, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Where a part of each block lies in the piece, and what of that is there.

    The part begins at row ``y`` and column ``x`` of the blocks; all is [blocks, rows, columns].
    """
    down = (y + tl.arange(0, ROWS))[None, :, None]
    across = (x + tl.arange(0, COLUMNS))[None, None, :]
    begin = first[:, None, None] + down * columns
    # A flat block is one row, or several without what is past the end of the piece.
    limit = tl.minimum(num_columns[:, None, None], numel - begin)
    limit = tl.where(down < num_rows[:, None, None], limit, 0)
    return begin + across, across < limit


@triton.jit
def _numbers_of_message(address, DTYPE: tl.constexpr):
    return address.to(tl.pointer_type(DTYPE), bitcast=True)


# The kernels


# Numbers that differ from call to call are no reason to compile again.
@triton.jit(
    do_not_specialize=[
        "first_program",
        "first_rank",
        "shard_size",
        "message_size",
    ]
)
def encode_kernel(
    rows,  # the table: see `codec_tables`
    piece_of,
    first_program,
    first_rank,
    numbers,  # shards, one after the other, from that of first_rank on
    shard_size,
    messages,  # of the same ranks
    message_size,
    RAW: tl.constexpr,  # the dtype of what is not coded
    BLOCKS: tl.constexpr,  # that a program handles at once, and of each so many
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the messages of consecutive ranks."""
    row, index = _row_of(rows, piece_of, first_program)
    kind, rank = tl.load(row), tl.load(row + 2) - first_rank
    start, numel, byte = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    own = numbers + rank * shard_size + start
    message = messages + rank * message_size
    if kind == _RAW:
        SIZE: tl.constexpr = BLOCKS * ROWS * COLUMNS
        at = index * SIZE + tl.arange(0, SIZE)
        is_there = at < numel
        values = _wide(tl.load(own + at, mask=is_there, other=0.0))
        target = _numbers_of_message(message + byte, RAW)
        tl.store(target + at, _narrow(values, RAW), mask=is_there)
    elif kind >= _INT8:
        height, width, columns = tl.load(row + 7), tl.load(row + 8), tl.load(row + 9)
        block, has_block, first, num_rows, num_columns = _blocks_of(row, index, BLOCKS)
        largest = tl.full([BLOCKS], 0, tl.int32)
        for y in range(0, height, ROWS):
            for x in range(0, width, COLUMNS):
                at, is_there = _elements_of(
                    first, num_rows, num_columns, columns, numel, y, x, ROWS, COLUMNS
                )
                values = _wide(tl.load(own + at, mask=is_there, other=0.0))
                magnitude = values.to(tl.int32, bitcast=True) & _MAGNITUDE
                largest = tl.maximum(largest, tl.max(tl.max(magnitude, 2), 1))
        is_finite = largest < _INFINITY
        finite = tl.where(is_finite, largest, 0).to(tl.float32, bitcast=True)
        top = tl.where(kind == _INT8, 127.0, 448.0)
        scale = tl.div_rn(tl.maximum(finite, _SMALLEST), tl.full([BLOCKS], 1.0, tl.float32) * top)
        scale_bits = tl.where(is_finite, scale.to(tl.int32, bitcast=True), _NAN)
        scales = _numbers_of_message(message, tl.int32) + tl.load(row + 6)
        tl.store(scales + block, scale_bits, mask=has_block)
        divisor = scale[:, None, None]
        nan_code = tl.where(kind == _INT8, 0, 0x7F)
        for y in range(0, height, ROWS):
            for x in range(0, width, COLUMNS):
                at, is_there = _elements_of(
                    first, num_rows, num_columns, columns, numel, y, x, ROWS, COLUMNS
                )
                values = _wide(tl.load(own + at, mask=is_there, other=0.0))
                values = tl.where(is_finite[:, None, None], values, 0.0)
                scaled = tl.div_rn(values, tl.broadcast_to(divisor, [BLOCKS, ROWS, COLUMNS]))
                if kind == _INT8:
                    code = _code_of_int8(scaled)
                else:
                    code = _code_of_e4m3(scaled)
                code = tl.where(is_finite[:, None, None], code, nan_code.to(tl.uint8))
                tl.store(message + byte + at, code, mask=is_there)


@triton.jit
def _address(messages, own, message, own_first, own_stop, num_left_out, message_size):
    """Of one message: those from ``own_first`` to ``own_stop`` are in ``own``."""
    if (message >= own_first) & (message < own_stop):
        address = own + (message - own_first) * message_size
    else:
        before = tl.where(message >= own_stop, num_left_out, 0)
        address = messages + (message - before) * message_size
    return address


@triton.jit
def _decoded(address, row, kind, byte, at, is_there, block, has_block):
    """The numbers of a part of blocks."""
    code = tl.load(address + byte + at, mask=is_there, other=0)
    scales = _numbers_of_message(address, tl.float32) + tl.load(row + 6)
    scale = tl.load(scales + block, mask=has_block, other=0.0)
    if kind == _INT8:
        number = _number_of_int8(code)
    else:
        number = _number_of_e4m3(code)
    return number * scale[:, None, None]


@triton.jit
def _put(target, values, is_there, SUBTRACTS: tl.constexpr):
    """Store, or subtract from what is there; then what is not finite is 0."""
    if SUBTRACTS:
        values = tl.load(target, mask=is_there, other=0.0) - values
        is_finite = (_bits(values) & _MAGNITUDE) < _INFINITY
        values = tl.where(is_finite, values, 0.0)
    tl.store(target, _narrow(values, target.dtype.element_ty), mask=is_there)


@triton.jit(
    do_not_specialize=[
        "first_program",
        "first_rank",
        "num_ranks",
        "own_first",
        "own_stop",
        "num_left_out",
        "message_size",
        "num_senders",
        "shard_size",
    ]
)
def decode_kernel(
    rows,  # the table: see `codec_tables`
    piece_of,
    first_program,
    first_rank,
    num_ranks,  # of which each sender has sent a message
    messages,  # sender by sender; of each, rank by rank
    own,  # those from own_first to own_stop, counted over all senders
    own_first,
    own_stop,
    num_left_out,  # of these in ``messages``: all or none
    message_size,
    num_senders,
    numbers,  # parts of the full buffer, one after the other, from that of first_rank on
    shard_size,
    kept_scales,  # KEEPS: where the scales go
    RAW: tl.constexpr,  # the dtype of what is not coded
    KEEPS: tl.constexpr,  # codes stay codes
    SUBTRACTS: tl.constexpr,  # from what is in ``numbers``
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Read messages into their parts of the full buffer; gaps become zero.

    Of several senders the numbers are added in order, in float32.
    """
    row, index = _row_of(rows, piece_of, first_program)
    kind, rank = tl.load(row), tl.load(row + 2) - first_rank
    start, numel, byte = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    target = numbers + rank * shard_size + start
    address = _address(messages, own, rank, own_first, own_stop, num_left_out, message_size)
    if kind >= _INT8:
        height, width, columns = tl.load(row + 7), tl.load(row + 8), tl.load(row + 9)
        block, has_block, first, num_rows, num_columns = _blocks_of(row, index, BLOCKS)
        if KEEPS:
            scales = _numbers_of_message(address, tl.float32) + tl.load(row + 6)
            scale = tl.load(scales + block, mask=has_block, other=0.0)
            tl.store(kept_scales + tl.load(row + 14) + block, scale, mask=has_block)
        for y in range(0, height, ROWS):
            for x in range(0, width, COLUMNS):
                at, is_there = _elements_of(
                    first, num_rows, num_columns, columns, numel, y, x, ROWS, COLUMNS
                )
                if KEEPS:
                    code = tl.load(address + byte + at, mask=is_there, other=0)
                    tl.store(target + at, code, mask=is_there)
                else:
                    values = _decoded(address, row, kind, byte, at, is_there, block, has_block)
                    for sender in range(1, num_senders):
                        message = sender * num_ranks + rank
                        another = _address(
                            messages, own, message, own_first, own_stop, num_left_out, message_size
                        )
                        values += _decoded(another, row, kind, byte, at, is_there, block, has_block)
                    _put(target + at, values, is_there, SUBTRACTS)
    elif not KEEPS:
        SIZE: tl.constexpr = BLOCKS * ROWS * COLUMNS
        at = index * SIZE + tl.arange(0, SIZE)
        is_there = at < numel
        is_raw = at < tl.where(kind == _RAW, numel, 0)
        source = _numbers_of_message(address + byte, RAW)
        values = _wide(tl.load(source + at, mask=is_raw, other=0.0))
        for sender in range(1, num_senders):
            message = sender * num_ranks + rank
            another = _address(
                messages, own, message, own_first, own_stop, num_left_out, message_size
            )
            source = _numbers_of_message(another + byte, RAW)
            values += _wide(tl.load(source + at, mask=is_raw, other=0.0))
        _put(target + at, values, is_there, SUBTRACTS)
