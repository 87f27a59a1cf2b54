"""Gradients that travel in 8 bits: the sum of what each rank has rounded, and its bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import MixedPrecisionPolicy, QuantizedGather, QuantizedReduce, fully_shard
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.ragged.blocks import BlockSize
from vescale_fsdp.testing import run_ranks

from ..dbuffer.rounding import rounded
from .helpers import assert_bit_equal, full_gradients, full_parameters, shard_units
from .models import MLP, TinyGPT, gpt_loss, inputs_of, make, tokens_of
from .straight_through import Rounds, StraightThrough, hidden_matrices
from .test_quantized_gather import BF16
from .test_wire import Wire


def no_vectors(size: BlockSize) -> Rounds:
    """What is rounded if nobody says otherwise, in int8."""
    least = math.prod(size) if isinstance(size, tuple) else size

    def rounds(name: str, param: nn.Parameter) -> tuple[str, BlockSize] | None:
        return ("int8", size) if param.dim() > 1 and param.numel() >= least else None

    return rounds


def nothing(name: str, param: nn.Parameter) -> None:
    return None


def train_both(
    reduce: QuantizedReduce,
    dtype: torch.dtype = torch.float32,
    gather: QuantizedGather | None = None,
    micro_batches: int = 1,
    **options: Any,
) -> None:
    """Three steps, sharded and in one process for each rank that emulates all of it."""
    plain, model = make(TinyGPT), make(TinyGPT)
    weights = nothing if gather is None else hidden_matrices(gather.dtype, gather.block)
    reference = StraightThrough(
        plain, weights, dtype, no_vectors(reduce.block), reduce.error_feedback
    )
    policy = BF16 if dtype == torch.bfloat16 else MixedPrecisionPolicy()
    shard_units(
        model, model.blocks, gather_codec=gather, reduce_codec=reduce, mp_policy=policy, **options
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (plain, model)]
    for step in range(3):
        batches = [tokens_of(10 * step + k, dist.get_rank()) for k in range(micro_batches)]
        losses = [lambda each, tokens=tokens: gpt_loss(each, tokens) for tokens in batches]
        expected = reference.backward(losses)
        for k, tokens in enumerate(batches):
            model.set_requires_gradient_sync(k == micro_batches - 1)
            loss = gpt_loss(model, tokens)
            loss.backward()
        assert loss.item() == expected, f"step {step}"
        assert_bit_equal(full_gradients(model), full_gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_bit_equal(full_parameters(model), full_parameters(plain))


def check_training() -> None:
    train_both(QuantizedReduce((4, 5), error_feedback=True))
    train_both(QuantizedReduce(64, error_feedback=True), micro_batches=2)
    train_both(QuantizedReduce(57), torch.bfloat16, QuantizedGather("e4m3", (4, 5)))


def test_gradients_are_the_sum_of_what_each_rank_has_rounded() -> None:
    run_ranks(check_training, 2)


def check_plain() -> None:
    train_both(QuantizedReduce(64))


def test_sums_of_three_ranks_are_in_their_order() -> None:
    run_ranks(check_plain, 3)


def test_it_is_an_all_to_all_also_where_others_are_reduce_scatters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_REDUCE", "native")
    run_ranks(check_plain, 2)


def check_one_rank() -> None:
    model = make(MLP, 1, 8)
    fully_shard(model, reduce_codec=QuantizedReduce(16))
    plain = make(MLP, 1, 8)
    for each in (plain, model):
        each(inputs_of(0, 0, 8)).sum().backward()
    assert_bit_equal(full_gradients(model), full_gradients(plain))


def test_nothing_is_rounded_on_one_rank() -> None:
    run_ranks(check_one_rank, 1)


def check_bytes() -> list[int]:
    found = []
    for options in ({"reduce_codec": QuantizedReduce(64)}, {}):
        model = make(MLP, 1, 64)
        fully_shard(model, **options)
        for _ in range(2):  # the first one settles the order
            loss = model(inputs_of(0, dist.get_rank(), 64)).sum()
            with Wire() as wire:
                loss.backward()
        found.append(wire.num_bytes)
    return found


def test_a_gradient_travels_as_a_byte_and_four_for_each_block() -> None:
    # 64 x 64 and a bias of 64 on 2 ranks: 2,080 numbers in each shard, that is 64 * 32.5; cut at
    # a multiple of 64 the first has 33 blocks, and there is room for 2,112: 33 scales (132 bytes,
    # to 144) and 2,112 codes there; 31 scales (124, to 128), 64 numbers of 4 bytes and 1,984 codes
    # on the other rank, which is the longer one. And a byte for each parameter: that it was used.
    assert run_ranks(check_bytes, 2) == [[128 + 4 * 64 + 31 * 64 + 2, 4 * 2080 + 2]] * 2


def check_overflow() -> None:
    """What is not finite is seen on every rank, and leaves no trace in what is made good for."""
    model = make(MLP, 1, 8)
    fully_shard(model, reduce_codec=QuantizedReduce(16, error_feedback=True))
    x = inputs_of(0, dist.get_rank(), 8)
    scale = math.inf if dist.get_rank() == 1 else 1.0
    (model(x).sum() * scale).backward()
    (weight,) = (p.grad.full_tensor() for name, p in model.named_parameters() if "weight" in name)
    assert weight.isnan().all()
    model.zero_grad()
    model(x).sum().backward()
    assert all(p.grad.full_tensor().isfinite().all() for p in model.parameters())


def test_overflow_is_seen_and_forgotten() -> None:
    run_ranks(check_overflow, 2)


def check_error_feedback() -> None:
    """With the same gradient at each step, what is lost is bounded by one rounding."""
    sums = {}
    for feedback in (False, True):
        model = make(MLP, 1, 16)
        fully_shard(model, reduce_codec=QuantizedReduce(256, error_feedback=feedback))
        exact = make(MLP, 1, 16)
        x = inputs_of(0, dist.get_rank(), 16)
        total = 0.0
        for _ in range(20):
            model.zero_grad()
            model(x).square().sum().backward()
            total = total + model.layers[0].weight.grad.full_tensor()
        exact(x).square().sum().backward()
        grad = exact.layers[0].weight.grad
        dist.all_reduce(grad)
        sums[feedback] = float((total / 20 - grad / 2).norm() / grad.norm())
    assert sums[True] < sums[False] / 10, sums


def test_error_feedback_makes_sums_over_steps_right() -> None:
    run_ranks(check_error_feedback, 2)


def check_replicas() -> None:
    """HSDP: rounded along the axis that shards, exact along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model, plain = make(MLP, 1, 8), make(MLP, 1, 8)
    fully_shard(model, mesh=mesh, reduce_codec=QuantizedReduce(16))
    x = inputs_of(0, dist.get_rank(), 8)
    model(x).sum().backward()
    reference = StraightThrough(plain, nothing)
    twin = reference.rounded()
    twin(x).sum().backward()
    parts = [torch.empty(8, 8) for _ in range(4)]
    dist.all_gather(parts, rounded(twin.layers[0].weight.grad, "int8", 16))
    pairs = [(parts[0] + parts[1]) * 0.5, (parts[2] + parts[3]) * 0.5]
    expected = (pairs[0] + pairs[1]) * 0.5
    assert torch.equal(model.layers[0].weight.grad.full_tensor(), expected)


def test_replicas_are_summed_as_without() -> None:
    run_ranks(check_replicas, 4)


def test_errors_take_four_bytes_for_each_element_and_only_where_asked() -> None:
    run_ranks(check_memory, 2)


def check_memory() -> None:
    for feedback in (False, True):
        model = make(MLP, 1, 8)
        fully_shard(model, reduce_codec=QuantizedReduce(16, error_feedback=feedback))
        model(inputs_of(0, 0, 8)).sum().backward()
        (group,) = units_in(model)[""].groups
        errors = group.gradients.residuals.flat
        assert (errors is not None) == feedback
        if errors is not None:
            assert errors.numel() == group.layout.total_size
