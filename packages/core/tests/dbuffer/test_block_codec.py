"""BlockCodec: ranks read the whole tensors, rounded block by block, wherever they are cut.

No ranks are needed: a message is a function of a shard.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vescale_fsdp.dbuffer import BlockCodec, Coding
from vescale_fsdp.dbuffer.eight_bits import CodeDtype
from vescale_fsdp.planner import ShardLayout, TensorSpec, lay_out
from vescale_fsdp.ragged.blocks import Blocks, BlockSize

from .rounding import assert_same_bits, rounded

Item = tuple[tuple[int, ...], tuple[CodeDtype, BlockSize] | None]

sizes = st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 5), st.integers(1, 5)))
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)
items = st.tuples(shapes, st.none() | st.tuples(st.sampled_from(["int8", "e4m3"]), sizes))


def made(chosen: list[Item], num_shards: int, raw: torch.dtype) -> tuple[BlockCodec, list[Tensor]]:
    codings = [
        None if how is None else Coding(how[0], Blocks(how[1], shape)) for shape, how in chosen
    ]
    specs = [
        TensorSpec(f"t{k}", shape, coding.blocks.unit if coding else 1)
        for k, ((shape, _), coding) in enumerate(zip(chosen, codings, strict=True))
    ]
    layout = lay_out(specs, num_shards, alignment=4)
    tensors = [torch.randn(shape) * 10.0 ** (k % 3) for k, (shape, _) in enumerate(chosen)]
    return BlockCodec(layout, codings, raw), tensors


def flat_of(layout: ShardLayout, tensors: list[Tensor]) -> Tensor:
    flat = torch.zeros(layout.total_size)
    for offset, tensor in zip(layout.offsets, tensors, strict=True):
        flat[offset : offset + tensor.numel()] = tensor.view(-1)
    return flat


def through_messages(codec: BlockCodec, flat: Tensor, dtype: torch.dtype) -> Tensor:
    layout = codec.layout
    full = torch.full((layout.total_size,), math.nan, dtype=dtype)
    parts = zip(flat.split(layout.shard_size), full.split(layout.shard_size), strict=True)
    for rank, (shard, part) in enumerate(parts):
        message = torch.full((codec.num_bytes(layout),), 255, dtype=torch.uint8)
        codec.encode(layout, rank, shard, message)
        codec.decode(layout, rank, message, part)
    return full


@given(st.lists(items, min_size=1, max_size=5), st.integers(1, 6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_messages_of_any_cut_read_as_the_whole_tensors_rounded(
    chosen: list[Item], num_shards: int, narrow: bool
) -> None:
    dtype = torch.bfloat16 if narrow else torch.float32
    codec, tensors = made(chosen, num_shards, dtype)
    full = through_messages(codec, flat_of(codec.layout, tensors), dtype)
    expected = [
        tensor if how is None else rounded(tensor, how[0], how[1])
        for tensor, (_, how) in zip(tensors, chosen, strict=True)
    ]
    assert_same_bits(full, flat_of(codec.layout, expected).to(dtype))  # gaps are zero, too


def test_a_message_has_a_byte_for_each_code_and_four_for_each_scale() -> None:
    # 64 x 32 in tiles of 16 x 16: 2 scales for every 16 rows. Rank 0 has 32 rows, 4 scales, and
    # as many elements, 1,024, as rank 1, that has 512 of them and the vector of 512.
    chosen: list[Item] = [((48, 32), ("int8", (16, 16))), ((512,), None)]
    codec, _ = made(chosen, 2, torch.bfloat16)
    assert codec.layout.shard_size == 1024
    assert codec.layout.offsets == (0, 1536)
    # Rank 0: 16 + 1,024. Rank 1: 2 scales (8, to 16) + 2 * 512 + 512: the longer one.
    assert codec.num_bytes(codec.layout) == 16 + 1024 + 512
    assert codec.num_bytes(codec.layout) % 16 == 0


def test_a_rank_without_elements_sends_an_empty_message_of_the_same_size() -> None:
    codec, tensors = made([((8, 8), ("e4m3", (8, 8)))], 4, torch.float32)
    assert codec.layout.local_range(0, 3) == (64, 64)  # the tile is on the first rank
    full = through_messages(codec, flat_of(codec.layout, tensors), torch.float32)
    assert_same_bits(full[:64].view(8, 8), rounded(tensors[0], "e4m3", (8, 8)))
    assert not full[64:].any()


def test_large_tensors_are_coded_in_parts_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[Item] = [((40, 24), ("int8", (4, 5))), ((1000,), ("e4m3", 7))]
    codec, tensors = made(chosen, 2, torch.float32)
    flat = flat_of(codec.layout, tensors)
    whole = through_messages(codec, flat, torch.float32)
    monkeypatch.setattr("vescale_fsdp.dbuffer.eight_bits._AT_ONCE_CPU", 200)
    assert_same_bits(through_messages(codec, flat, torch.float32), whole)
