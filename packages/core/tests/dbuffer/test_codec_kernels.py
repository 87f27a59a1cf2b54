"""Triton's kernels write and read the bits of torch's operators. They run in its interpreter.

No ranks are needed: a message is a function of a shard.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fsdp.dbuffer import (
    BlockCodec,
    Coding,
    DBuffer,
    EncodedShard,
    KeptCodes,
    SlabPool,
)
from vescale_fsdp.dbuffer import codec_launches as launching
from vescale_fsdp.dbuffer import codec_tables as tables
from vescale_fsdp.dbuffer.codec import decoded_sum, encode_parts, start_encoded_gather
from vescale_fsdp.dbuffer.eight_bits import CodeDtype
from vescale_fsdp.planner import ShardLayout, TensorSpec, lay_out
from vescale_fsdp.ragged.blocks import Blocks, BlockSize
from vescale_fsdp.testing import run_ranks

from .interpreter import compiled, interpreted, torchs_operators

triton = pytest.importorskip("triton", reason="the kernels are Triton's")

Item = tuple[tuple[int, ...], tuple[CodeDtype, BlockSize] | None]

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
POOL = SlabPool(CPU)
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # to shrink takes minutes in the interpreter
# The ends of the ranges, ties, the floor of scales, denormals, and what is not finite.
SPECIAL = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1e-12, -1e-12, 0.99e-12, 1e-30, 1e-40, -1e-45,
    3e38, -3e38, 6e-8, -3e-8, 0.5, 1.5, 2.5, 448.0, -448.0, 127.0, 464.0, 1.0625, 0.001953125,
]  # fmt: skip

sizes = st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 5), st.integers(1, 5)))
shapes = st.one_of(
    st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple),
    st.lists(st.integers(1, 4), min_size=3, max_size=4).map(tuple),
)
codings = st.tuples(st.sampled_from(["int8", "e4m3"]), sizes)
items = st.tuples(shapes, st.none() | codings)


@pytest.fixture(scope="module", autouse=True)
def small_programs() -> Iterator[None]:
    with mock.patch.object(tables, "_AT_ONCE", 64):  # so that small pieces take several programs
        yield


def layout_of(chosen: list[Item], num_shards: int) -> tuple[ShardLayout, list[Coding | None]]:
    codings = [
        None if how is None else Coding(how[0], Blocks(how[1], shape)) for shape, how in chosen
    ]
    specs = [
        TensorSpec(f"t{k}", shape, coding.blocks.unit if coding else 1)
        for k, ((shape, _), coding) in enumerate(zip(chosen, codings, strict=True))
    ]
    return lay_out(specs, num_shards, alignment=4), codings


def numbers_for(layout: ShardLayout, seed: int, dtype: torch.dtype, share: float) -> Tensor:
    """Of very different magnitudes; a share of them are special. Gaps are zero."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.total_size,)
    magnitudes = torch.randint(-9, 9, shape, generator=generator).float()
    values = torch.randn(shape, generator=generator) * 10.0 ** (magnitudes * (seed % 3) / 4)
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=generator)]
    values = torch.where(torch.rand(shape, generator=generator) < share, special, values)
    flat = torch.zeros(shape)
    for offset, spec in zip(layout.offsets, layout.specs, strict=True):
        flat[offset : offset + spec.numel] = values[offset : offset + spec.numel]
    return flat.to(dtype)


def bits(numbers: Tensor) -> Tensor:
    """As integers, but one NaN for all."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[numbers.dtype.itemsize]
    found = numbers.view(kind)
    return found if kind == torch.uint8 else found.masked_fill(numbers.isnan(), -1)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(bits(found), bits(expected))


def empty_messages(codec: BlockCodec, device: torch.device = CPU) -> Tensor:
    """Bytes of ones: what nobody writes can be seen."""
    shape = (codec.layout.num_shards, codec.num_bytes(codec.layout))
    return torch.full(shape, 255, dtype=torch.uint8, device=device)


def assert_same_messages(codec: BlockCodec, found: Tensor, expected: Tensor) -> None:
    """Byte by byte, but one NaN for all: in e4m3 it has a sign, in raw numbers a dozen of bits."""
    found, expected = found.clone(), expected.clone()
    for messages in (found, expected):
        for rank, message in enumerate(messages):
            plan = codec._plan(rank)
            for raw in codec._raw_parts(plan, message):
                raw.masked_fill_(raw.isnan(), math.nan)
            for piece in plan.coded:
                if piece.coding is not None and piece.coding.dtype == "e4m3":
                    codes = message.narrow(0, piece.byte, piece.numel)
                    codes.masked_fill_(codes == 0xFF, 0x7F)
    assert torch.equal(found, expected)


def written(codec: BlockCodec, full: Tensor) -> Tensor:
    """The messages, one after the other."""
    layout, messages = codec.layout, empty_messages(codec, full.device)
    for rank, shard in enumerate(full.split(layout.shard_size)):
        codec.encode(layout, rank, shard, messages[rank])
    return messages


def read(codec: BlockCodec, messages: Tensor, dtype: torch.dtype) -> Tensor:
    layout = codec.layout
    full = torch.full((layout.total_size,), 7, dtype=dtype, device=messages.device)
    for rank, part in enumerate(full.split(layout.shard_size)):
        codec.decode(layout, rank, messages[rank], part)
    return full


def compare(
    chosen: list[Item],
    num_shards: int,
    seed: int,
    share: float,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    device: torch.device = CPU,
) -> None:
    of_shard, raw, of_full = dtypes
    layout, codings = layout_of(chosen, num_shards)
    full = numbers_for(layout, seed, of_shard, share).to(device)
    takes_kernels = interpreted() if device == CPU else compiled()
    with torchs_operators():
        reference = BlockCodec(layout, codings, raw)
        expected = written(reference, full)
        values = read(reference, expected, of_full)
    with takes_kernels:
        codec = BlockCodec(layout, codings, raw)
        assert codec.is_at_once(device, of_shard)
        found = written(codec, full)
        assert_same_messages(codec, found, expected)
        together = empty_messages(codec, device)
        codec.encode_all(full, together)
        assert torch.equal(together, found)
        assert_same_bits(read(codec, expected, of_full), values)
        # All at once; those of two ranks lie elsewhere, and what is in their places is not read.
        first, stop = num_shards // 2, min(num_shards // 2 + 2, num_shards)
        own = expected[first:stop].clone()
        together[first:stop] = 99
        result = torch.full_like(values, 7)
        codec.decode_all(together.view(-1), own.view(-1), first, result)
        assert_same_bits(result, values)


@given(
    st.lists(items, min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.tuples(*[st.sampled_from(FLOATS)] * 3),
)
@settings(max_examples=20, deadline=None, phases=PHASES)
def test_messages_and_numbers_have_the_bits_of_torch_s_operators(
    chosen: list[Item],
    num_shards: int,
    seed: int,
    share: float,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> None:
    compare(chosen, num_shards, seed, share, dtypes)


@pytest.mark.nightly
def test_blocks_larger_than_a_program_takes_at_once() -> None:
    chosen: list[Item] = [
        ((330,), ("int8", 150)),  # 2 blocks of 150, the last of 30
        ((9, 50), ("e4m3", (4, 35))),  # rows and columns over
        ((2, 5, 12), ("int8", (4, 5))),  # a stack: each matrix has a smaller last tile
        ((2, 1, 3, 20), ("e4m3", (4, 5))),  # flat blocks of 20
        ((33,), None),
    ]
    with mock.patch.object(tables, "_AT_ONCE", 128):
        compare(chosen, 2, 1, 0.0, (torch.float32, torch.bfloat16, torch.bfloat16))


def neighbours(values: Tensor) -> Tensor:
    """Float32 numbers, and those next to them."""
    flat = values.float().view(-1)
    up, down = (torch.nextafter(flat, torch.tensor(x)) for x in (math.inf, -math.inf))
    return torch.cat([flat, up, down])


@pytest.mark.parametrize(("dtype", "top"), [("int8", 127.0), ("e4m3", 448.0)])
def test_all_codes_and_all_ties_between_them(dtype: CodeDtype, top: float) -> None:
    """The scale is 1, since the largest number is the top."""
    kind = torch.int8 if dtype == "int8" else torch.float8_e4m3fn
    codes = torch.arange(256, dtype=torch.uint8).view(kind).float()
    codes = codes[codes.abs() <= top].sort().values
    numbers = neighbours(torch.cat([codes, (codes[1:] + codes[:-1]) / 2]))
    numbers = numbers[numbers.abs() <= top]
    assert numbers.abs().max() == top
    with mock.patch.object(tables, "_AT_ONCE", 2048):
        compare_block(numbers, dtype)


def compare_block(numbers: Tensor, dtype: CodeDtype) -> None:
    layout = lay_out([TensorSpec("t", (len(numbers),), len(numbers))], 1)
    coding = Coding(dtype, Blocks(len(numbers), (len(numbers),)))
    full = torch.zeros(layout.total_size)
    full[: len(numbers)] = numbers
    with torchs_operators():
        expected = written(BlockCodec(layout, [coding], torch.float32), full)
    with interpreted():
        codec = BlockCodec(layout, [coding], torch.float32)
        assert torch.equal(written(codec, full), expected)
    assert expected[0, :4].view(torch.float32) == 1.0


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_decoded_numbers_are_rounded_once_to_the_nearest_ties_to_even(to: torch.dtype) -> None:
    """Every code times scales of all magnitudes, denormals and overflows among the results."""
    num_blocks = 40
    blocks = Blocks(256, (num_blocks, 256))
    layout = lay_out([TensorSpec("t", (num_blocks, 256), 256)], 1)
    scales = torch.logspace(-9, 4, num_blocks)
    scales[:4] = torch.tensor([1.0, 1 + 2.0**-8, 2.0**-24, 2.0**-25])  # ties
    message = torch.zeros(1, 4 * num_blocks + 256 * num_blocks, dtype=torch.uint8)
    message[0, : 4 * num_blocks].view(torch.float32).copy_(scales)
    message[0, 4 * num_blocks :] = torch.arange(256, dtype=torch.uint8).repeat(num_blocks)
    for dtype in ("int8", "e4m3"):
        coding = Coding(dtype, blocks)
        with torchs_operators():
            reference = BlockCodec(layout, [coding], torch.float32)
            assert reference.num_bytes(layout) == message.numel()
            usual = message.clone()
            if dtype == "e4m3":  # NaN: its block has the scale NaN, so that no such code is read
                usual[0, 4 * num_blocks :].masked_fill_(usual[0, 4 * num_blocks :] & 127 == 127, 0)
            expected = read(reference, usual, to)
        with interpreted(), mock.patch.object(tables, "_AT_ONCE", 2048):
            codec = BlockCodec(layout, [coding], torch.float32)
            assert_same_bits(read(codec, usual, to), expected)


@given(
    st.lists(items, min_size=1, max_size=3),
    st.integers(2, 4),
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=6, deadline=None, phases=PHASES)
def test_messages_of_gradients_and_what_they_lose(
    chosen: list[Item], num_shards: int, seed: int, raw: torch.dtype
) -> None:
    layout, codings = layout_of(chosen, num_shards)
    full = numbers_for(layout, seed, torch.bfloat16, 0.02)
    lost = numbers_for(layout, seed + 1, torch.float32, 0.0) / 100

    def messages_and_errors(keeps: bool) -> tuple[Tensor, Tensor]:
        codec = BlockCodec(layout, codings, raw)
        messages, errors = empty_messages(codec), lost.clone()
        encode_parts(codec, layout, full, messages, POOL, errors if keeps else None)
        return messages, errors

    for keeps in (True, False):
        with torchs_operators():
            expected = messages_and_errors(keeps)
        with interpreted():
            found = messages_and_errors(keeps)
        assert_same_messages(BlockCodec(layout, codings, raw), found[0], expected[0])
        assert_same_bits(found[1], expected[1])


@pytest.mark.parametrize("own_is_elsewhere", [False, True])
@pytest.mark.parametrize("parts_each", [1, 2])
def test_sums_of_what_all_ranks_have_sent(own_is_elsewhere: bool, parts_each: int) -> None:
    num_senders = 3
    chosen: list[Item] = [((40, 9), ("e4m3", (4, 5))), ((70,), None), ((90,), ("int8", 8))]
    layout, codings = layout_of(chosen, num_senders * parts_each)
    with torchs_operators():
        reference = BlockCodec(layout, codings, torch.float32)
        sent = [
            written(reference, numbers_for(layout, seed, torch.bfloat16, 0.01)).view(
                num_senders, -1
            )
            for seed in range(num_senders)
        ]
        reads = [[each[rank].clone() for each in sent] for rank in range(num_senders)]
        expected = [
            decoded_sum(reference, layout, rank, reads[rank], POOL) for rank in range(num_senders)
        ]
    with interpreted():
        codec = BlockCodec(layout, codings, torch.float32)
        for rank in range(num_senders):
            received = reads[rank]
            if own_is_elsewhere:
                own = received.pop(rank)
            slab = torch.stack(received)
            received = list(slab.unbind())
            if own_is_elsewhere:
                received.insert(rank, own)
            with mock.patch.object(codec, "decode", side_effect=AssertionError("one by one")):
                found = decoded_sum(codec, layout, rank, received, POOL)
            assert_same_bits(found, expected[rank])


def test_messages_that_lie_anywhere_are_read_one_by_one() -> None:
    layout, codings = layout_of([((40, 9), ("e4m3", (4, 5)))], 3)
    with interpreted():
        codec = BlockCodec(layout, codings, torch.float32)
        total = torch.empty(layout.shard_size)
        slab = written(codec, numbers_for(layout, 0, torch.float32, 0.0))
        assert not codec.add_all(0, [slab[0], slab[2], slab[1]], total)
        assert codec.add_all(0, [slab[0], slab[1], slab[2]], total)


def test_codes_that_stay_codes_and_their_scales() -> None:
    chosen = [((40, 9), "e4m3", (4, 5)), ((6, 8), "int8", (2, 3)), ((90,), "int8", 8)]
    codings = [Coding(dtype, Blocks(size, shape), False) for shape, dtype, size in chosen]
    specs = [TensorSpec(f"t{k}", c.blocks.shape, c.blocks.unit) for k, c in enumerate(codings)]
    layout = lay_out(specs, 3, alignment=4)
    full = numbers_for(layout, 0, torch.float32, 0.01)

    def kept(at_once: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        codec = KeptCodes(layout, codings, CPU)
        assert codec.is_at_once(CPU, torch.uint8) == at_once
        messages = written(codec, full)
        codes = torch.full((layout.total_size,), 7, dtype=torch.uint8)
        if at_once:
            codec.decode_all(messages.view(-1), messages[0], 0, codes)
            scales = [each.clone() for each in codec.scales]
            assert torch.equal(read(codec, messages, torch.uint8), codes)
            for again, scale in zip(codec.scales, scales, strict=True):
                assert_same_bits(again, scale)
        else:
            codes = read(codec, messages, torch.uint8)
        return messages, codes, codec.scales

    with torchs_operators():
        expected = kept(False)
    with interpreted():
        found = kept(True)
    codec = KeptCodes(layout, codings, CPU)
    assert_same_messages(codec, found[0], expected[0])
    assert_same_bits(found[1], expected[1])
    for one, other in zip(found[2], expected[2], strict=True):
        assert_same_bits(one, other)


def test_other_dtypes_are_for_torch_s_operators() -> None:
    layout, codings = layout_of([((40, 9), ("e4m3", (4, 5))), ((8,), None)], 2)
    with interpreted():
        assert not BlockCodec(layout, codings, torch.float32).is_at_once(CPU, torch.float64)
        assert not BlockCodec(layout, codings, torch.float64).is_at_once(CPU, torch.float32)


# The choice


def test_the_kernels_are_not_chosen_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VESCALE_FSDP_CODEC", raising=False)
    assert not launching.takes_kernels(CPU)


def test_other_values_are_errors_and_so_is_triton_without_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_CODEC", "cuda")
    with pytest.raises(ValueError, match="must be auto, torch or triton, got 'cuda'"):
        launching.takes_kernels(CPU)
    monkeypatch.setenv("VESCALE_FSDP_CODEC", "triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="triton is not installed"):
        launching.takes_kernels(CPU)


def test_kernels_that_fail_or_write_other_bits_are_not_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    launching._passes.cache_clear()
    with interpreted():
        assert launching._passes(CPU)
        launching._passes.cache_clear()
        with mock.patch.object(launching, "encode"):  # writes nothing
            assert not launching._passes(CPU)
        assert "write other bits" in caplog.text
        launching._passes.cache_clear()
        with mock.patch.object(launching, "encode", side_effect=RuntimeError("no compiler")):
            assert not launching._passes(CPU)
        assert "do not run" in caplog.text
        assert "no compiler" in caplog.text
    launching._passes.cache_clear()


# What it is for


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Done:
    def wait(self) -> None:
        """It has ended."""


def operators(num_shards: int) -> int:
    """Of torch, or launches, in a gather of 12 parameters: 6 matrices in tiles, 6 vectors."""
    shapes = [(512, 128), (128,), (128, 128), (128,)] * 3
    codings = [
        Coding("e4m3", Blocks((128, 128), each)) if len(each) == 2 else None for each in shapes
    ]
    specs = [
        TensorSpec(f"t{k}", shape, coding.blocks.unit if coding else 1)
        for k, (shape, coding) in enumerate(zip(shapes, codings, strict=True))
    ]
    layout = lay_out(specs, num_shards, alignment=8)
    codec = BlockCodec(layout, codings, torch.bfloat16)
    buffer = DBuffer(
        layout,
        [torch.Size(each) for each in shapes],
        0,
        shard_dtype=torch.float32,
        full_dtype=torch.bfloat16,
        device=CPU,
        full_device=CPU,
    )
    launch = mock.Mock()
    with (
        mock.patch.object(launching, "encode", launch),
        mock.patch.object(launching, "decode", launch),
    ):
        for _ in range(2):  # the first one makes the table
            launch.reset_mock()
            with Counted() as counted:
                start_encoded_gather(
                    codec, buffer, buffer.shard, 0, POOL, lambda *_: Done(), EncodedShard()
                ).wait()
    return counted.count + launch.call_count


def test_a_gather_is_two_launches_for_any_number_of_ranks() -> None:
    with torchs_operators():
        before = [operators(num_shards) for num_shards in (8, 64)]
    with interpreted():
        after = [operators(num_shards) for num_shards in (8, 64)]
    assert before[1] > 800
    assert after[0] == after[1] < 12  # two launches; views, and memory for messages


# Compiled, but not run


@pytest.mark.nightly
def test_compiled_for_gpus_no_product_is_fused_and_no_quotient_approximate(tmp_path: Path) -> None:
    """For two generations. Without a rounding (``mul.f32``) the assembler may fuse, too."""
    environ = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("compile_kernels.py")
    arguments = [sys.executable, str(script), "80", "90"]
    done = subprocess.run(arguments, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"\b((?:add|sub|mul|div|fma|mad|rcp)\.[a-z.]*f32)", done.stdout)
    assert set(found) == {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32"}


def check_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    chosen: list[Item] = [
        ((5000,), ("int8", 256)),
        ((300, 260), ("e4m3", (128, 128))),
        ((2, 70, 90), ("int8", (32, 32))),
        ((3, 5000), ("e4m3", (1, 5000))),
        ((777,), None),
    ]
    for seed, share in ((0, 0.0), (1, 0.02), (2, 0.0)):
        for dtype in FLOATS:
            compare(chosen, 4, seed, share, (dtype, torch.bfloat16, dtype), device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bits_on_a_gpu() -> None:
    run_ranks(check_on_a_gpu, 1)  # this process may be the interpreter's
