"""Weights that forward sees as codes and scales: `QuantizedGather(decode=False)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import (
    QuantizedGather,
    QuantizedReduce,
    QuantizedWeight,
    fully_shard,
    unsharded,
)
from vescale_fsdp.dbuffer import Coding
from vescale_fsdp.dbuffer.eight_bits import CodeDtype, encode_blocks
from vescale_fsdp.engine.quantized_weight import scaled_linear
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.ragged.blocks import Blocks, BlockSize
from vescale_fsdp.testing import run_ranks

from ..dbuffer.rounding import rounded
from .helpers import assert_bit_equal, full_gradients, full_parameters, shard_units
from .models import TinyGPT, gpt_loss, inputs_of, make, tokens_of
from .test_quantized_gather import BF16


def weight_of(
    whole: Tensor, dtype: CodeDtype, size: BlockSize, to: torch.dtype = torch.float32
) -> QuantizedWeight:
    coding = Coding(dtype, Blocks(size, tuple(whole.shape)), decodes=False)
    codes = torch.empty(whole.shape, dtype=torch.uint8)
    scales = torch.empty(coding.blocks.grid)
    encode_blocks(coding, whole.reshape(-1), codes.view(-1), scales.view(-1))
    return QuantizedWeight(codes, scales, coding, to)


# The tensor


@pytest.mark.parametrize("size", [(4, 4), (3, 5), 7, (1, 12)])
@pytest.mark.parametrize("dtype", ["int8", "e4m3"])
def test_it_is_what_its_codes_stand_for(dtype: CodeDtype, size: BlockSize) -> None:
    whole = torch.randn(9, 12)
    weight = weight_of(whole, dtype, size)
    assert (weight.shape, weight.dtype) == (whole.shape, torch.float32)
    assert torch.equal(weight.dequantize(), rounded(whole, dtype, size))
    stack = torch.randn(3, 8, 5)
    assert torch.equal(weight_of(stack, dtype, (4, 2)) * 1.0, rounded(stack, dtype, (4, 2)))


FUNCTIONS: dict[str, Any] = {
    "linear": lambda w, x: F.linear(x, w),
    "linear of a vector": lambda w, x: F.linear(x[0, 0], w),
    "linear with a bias": lambda w, x: F.linear(x, w, x[0, 0, :9]),
    "matmul": lambda w, x: x @ w.t(),
    "a view": lambda w, x: w.view(-1)[3:40].square() * x.sum(),
    "indexing": lambda w, x: w[2] * x[0],
    "as an input": lambda w, x: F.linear(w, x[0]),
    "twice": lambda w, x: F.linear(x, w) + (x @ w.transpose(0, 1)).sin(),
    "einsum": lambda w, x: torch.einsum("bti,oi->bto", x, w),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_function_takes_it_with_plain_gradients(name: str) -> None:
    whole = torch.randn(9, 12)
    weight = nn.Parameter(weight_of(whole, "e4m3", (4, 4)))
    assert isinstance(weight, QuantizedWeight)
    plain = nn.Parameter(rounded(whole, "e4m3", (4, 4)))
    results, gradients = [], []
    for each in (weight, plain):
        x = inputs_of(0, 0, 12).view(1, -1, 12).clone().requires_grad_()
        result = FUNCTIONS[name](each, x)
        result.square().sum().backward()
        results.append(result.detach())
        gradients.append((each.grad, x.grad))
    assert torch.equal(*results)
    for ours, theirs in zip(*gradients, strict=True):
        assert type(ours) is Tensor
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_it_cannot_be_written_to() -> None:
    weight = weight_of(torch.randn(4, 4), "int8", 4)
    with pytest.raises(RuntimeError, match="would write to a gathered weight that is kept in int8"):
        weight.mul_(2)


def test_backward_keeps_codes_and_no_decoded_weight() -> None:
    weight = nn.Parameter(weight_of(torch.randn(8, 8), "int8", 8))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.linear(torch.randn(2, 8), weight)
    assert [type(each) for each in kept] == [Tensor, QuantizedWeight]


def test_products_of_codes_are_those_of_what_they_stand_for() -> None:
    """By rows, which torch multiplies on a CPU as well; for tiles there is no such product here."""
    torch.manual_seed(0)
    whole, x, bias = torch.randn(32, 48), torch.randn(2, 5, 48), torch.randn(32)
    for size in ((1, 48), 48):
        weight = weight_of(whole, "e4m3", size)
        found = scaled_linear(x, weight, bias)
        own = rounded(x.view(10, 48), "e4m3", 48)
        expected = F.linear(own, weight.dequantize(), bias).view(2, 5, 32)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
        narrow = weight_of(whole, "e4m3", size, torch.bfloat16)
        result = scaled_linear(x.bfloat16(), narrow, bias.bfloat16())
        assert result.dtype == torch.bfloat16
        own = rounded(x.bfloat16().float().view(10, 48), "e4m3", 48)
        stands_for = [each.bfloat16().float() for each in (narrow.dequantize(), bias)]
        expected = F.linear(own, *stands_for).view(2, 5, 32)
        torch.testing.assert_close(result.float(), expected, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("size", [(128, 128), (1, 640), 640])
def test_torch_takes_them_on_cuda_as_far_as_it_checks(
    size: BlockSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes, strides and dtypes pass torch's own checks for CUDA, on sizes that need padding."""
    seen: list[tuple[Any, ...]] = []
    real = F.scaled_mm

    def like(value: Any) -> Any:
        """On CUDA and without data."""
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    def scaled_mm(*args: Any, output_dtype: torch.dtype) -> Tensor:
        seen.append(args)
        with FakeTensorMode():
            checked = real(*map(like, args), output_dtype=output_dtype)
        return torch.zeros(checked.shape, dtype=checked.dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    weight = weight_of(torch.randn(256, 640), "e4m3", size, torch.bfloat16)
    x, bias = torch.randn(7, 640).bfloat16(), torch.randn(256).bfloat16()
    assert torch.equal(scaled_linear(x, weight, bias), bias.expand(7, 256))
    if size == (128, 128):
        a, _, of_a, _, of_b, _ = seen[0]
        assert torch.equal(of_b[:5].t(), weight.scales)
        own = (a.float().unflatten(1, (5, 128)) * of_a[:, :, None]).flatten(1)
        assert torch.equal(own[:7].bfloat16(), rounded(x.float(), "e4m3", 128).bfloat16())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of capability 9.0")
def test_products_on_cuda_are_near_those_of_decoded_weights() -> None:
    whole = torch.randn(256, 640)
    x = torch.randn(3, 7, 640, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sizes: list[BlockSize] = [(128, 128), 640]
    for size in sizes:
        host = weight_of(whole, "e4m3", size, torch.bfloat16)
        codes, scales = host.codes.cuda(), host.scales.cuda()
        weight = nn.Parameter(QuantizedWeight(codes, scales, host.coding, torch.bfloat16))
        found, expected = F.linear(x, weight), F.linear(x, weight.dequantize())
        assert (found - expected).norm() < 0.05 * expected.norm()
        assert not torch.equal(found, expected), "the input was rounded too"
        found.sum().backward()
        assert weight.grad is not None


# In the engine


def train(gather: QuantizedGather, **options: Any) -> tuple[list[float], dict[str, Any]]:
    model = make(TinyGPT)
    shard_units(model, model.blocks, gather_codec=gather, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            loss = gpt_loss(model, tokens_of(2 * step + sync, dist.get_rank()))
            loss.backward()
            losses.append(loss.item())
        found = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return losses, found | {f"{name} itself": p for name, p in full_parameters(model).items()}


def check_training() -> None:
    kinds: list[tuple[CodeDtype, BlockSize, dict[str, Any]]] = [
        ("int8", (4, 5), {"reduce_codec": QuantizedReduce(16)}),
        ("e4m3", 12, {"reshard_after_forward": False}),
        ("e4m3", (4, 4), {"mp_policy": BF16}),
    ]
    for dtype, size, options in kinds:
        expected = train(QuantizedGather(dtype, size), **options)
        found = train(QuantizedGather(dtype, size, decode=False), **options)
        assert found[0] == expected[0]
        assert_bit_equal(found[1], expected[1])


def check_memory_and_forms() -> None:
    model = make(TinyGPT)
    gather = QuantizedGather("e4m3", (4, 4), decode=False)
    shard_units(model, model.blocks, gather_codec=gather)
    block = model.blocks[0]
    codes, rest = sorted(units_in(block)[""].groups, key=lambda g: g.codec is None)
    assert codes.buffer.full.region.storage.nbytes() == codes.layout.total_size  # a byte for each
    assert rest.codec is None
    assert codes.layout.alignment == 16
    gpt_loss(model, tokens_of(0, dist.get_rank())).backward()
    model.zero_grad()
    masters = full_parameters(model)
    with unsharded(model, writeback=True):
        weight = block.up.weight
        assert isinstance(weight, QuantizedWeight)
        expected = rounded(masters["blocks.0.up.weight"], "e4m3", (4, 4))
        assert torch.equal(weight.dequantize(), expected)
        state = model.state_dict()  # within, too
        with torch.no_grad(), pytest.raises(RuntimeError, match="would write to"):
            weight.zero_()
    assert_bit_equal(full_parameters(model), masters)
    assert state["blocks.0.up.weight"].shape == expected.shape
    x = inputs_of(0, 0, 12).view(1, -1, 12).requires_grad_()
    outputs = [block(x), checkpoint(block, x, use_reentrant=False)]
    assert torch.equal(*outputs)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens_of(0, dist.get_rank())).float().sum().backward()
    assert block.up.weight.grad is not None


def check_on_two_ranks() -> None:
    check_training()
    check_memory_and_forms()


def test_it_trains_as_decoded_weights_do() -> None:
    run_ranks(check_on_two_ranks, 2, timeout_s=90)


def check_on_four_ranks() -> None:
    gather = QuantizedGather("int8", (4, 5))
    kept = QuantizedGather("int8", (4, 5), decode=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for options in (
        {"reshard_after_forward": 2},
        {"mesh": mesh, "sharding": "hsdp_zero1"},
        {"sharding": "zero2"},
    ):
        expected, found = train(gather, **options), train(kept, **options)
        assert found[0] == expected[0]
        assert_bit_equal(found[1], expected[1])
    layer = nn.Sequential(nn.Linear(8, 16))
    parallelize_module(layer, mesh["inner"], {"0": ColwiseParallel()})
    with pytest.raises(NotImplementedError, match="computes with numbers and not with codes"):
        fully_shard(
            layer, mesh=mesh["outer"], gather_codec=QuantizedGather(block=(4, 4), decode=False)
        )


@pytest.mark.nightly
def test_parts_that_are_kept_and_other_axes_have_the_same_bits() -> None:
    run_ranks(check_on_four_ranks, 4, timeout_s=90)
