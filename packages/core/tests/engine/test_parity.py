"""Losses, gradients and parameters are those of DistributedDataParallel, or of FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from vescale_fsdp import MixedPrecisionPolicy, fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import (
    Tensors,
    assert_bit_equal,
    assert_gradients_like_plain,
    averaged_gradients,
    full_gradients,
    full_parameters,
    shard_units,
)
from .models import (
    MLP,
    Branches,
    OddParameters,
    TinyGPT,
    gpt_loss,
    inputs_of,
    make,
    tokens_of,
)

Run = tuple[list[float], Tensors]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sharded_gpt(**options: Any) -> nn.Module:
    model = make(TinyGPT)
    return shard_units(model, model.blocks, **options)


def train_gpt(model: nn.Module, forward: nn.Module, optimizer_name: str, num_steps: int) -> Run:
    """Losses of this rank, step by step, and the parameters at the end."""
    optimizer = make_optimizer(optimizer_name, model)
    losses = []
    for step in range(num_steps):
        loss = gpt_loss(forward, tokens_of(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, full_parameters(model)


def train_ours_and_ddp(optimizer_name: str, num_steps: int) -> tuple[Run, Run]:
    ours = sharded_gpt()
    plain = make(TinyGPT)
    return (
        train_gpt(ours, ours, optimizer_name, num_steps),
        train_gpt(plain, DistributedDataParallel(plain), optimizer_name, num_steps),
    )


@pytest.mark.parametrize(("optimizer_name", "num_steps"), [("adamw", 50), ("sgd", 20)])
def test_steps_on_two_ranks_are_bit_equal_to_ddp(optimizer_name: str, num_steps: int) -> None:
    for (losses, parameters), (ddp_losses, ddp_parameters) in run_ranks(
        train_ours_and_ddp, 2, optimizer_name, num_steps
    ):
        assert losses == ddp_losses
        assert_bit_equal(parameters, ddp_parameters)
        assert losses[0] > 2.5  # log(23) is 3.1
        assert len(set(losses)) == num_steps


def test_twenty_steps_on_four_ranks_are_close_to_ddp() -> None:
    for (losses, parameters), (ddp_losses, ddp_parameters) in run_ranks(
        train_ours_and_ddp, 4, "adamw", 20
    ):
        # Four ranks: the order of a sum of four is not fixed.
        torch.testing.assert_close(losses, ddp_losses, rtol=0, atol=1e-6)
        torch.testing.assert_close(parameters, ddp_parameters, rtol=0, atol=1e-5)


def check_literal_gradient() -> None:
    linear = nn.Linear(3, 1, bias=False)
    nn.init.ones_(linear.weight)
    fully_shard(linear)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.25)
    rank = dist.get_rank()
    linear(torch.tensor([[1.0, 10.0, 100.0]]) * (rank + 1)).sum().backward()
    assert linear.weight.grad is not None
    # The mean of factors 1 and 2 is 1.5.
    assert linear.weight.grad.full_tensor().tolist() == [[1.5, 15.0, 150.0]]
    optimizer.step()
    assert linear.weight.full_tensor().tolist() == [[0.625, -2.75, -36.5]]


def test_gradient_is_the_mean_over_ranks() -> None:
    run_ranks(check_literal_gradient, 2)


def check_gradients_against_ddp() -> None:
    ours, plain = sharded_gpt(), make(TinyGPT)
    ddp = DistributedDataParallel(plain)
    sums = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
    for step in range(3):
        tokens = tokens_of(step, dist.get_rank())
        plain.zero_grad()
        gpt_loss(ddp, tokens).backward()
        for name, gradient in full_gradients(plain).items():
            sums[name] += gradient
        gpt_loss(ours, tokens).backward()
        assert_bit_equal(full_gradients(ours), sums)


def test_gradients_equal_those_of_ddp_and_accumulate_over_backwards() -> None:
    run_ranks(check_gradients_against_ddp, 2)


def check_accumulation_without_sync(num_micro_batches: int) -> None:
    ours, plain = sharded_gpt(), make(TinyGPT)
    ddp = DistributedDataParallel(plain)
    optimizers = [make_optimizer("adamw", ours), make_optimizer("adamw", plain)]
    for step in range(3):
        for micro in range(num_micro_batches):
            is_last = micro == num_micro_batches - 1
            tokens = tokens_of(10 * step + micro, dist.get_rank())
            ours.set_requires_gradient_sync(is_last)
            gpt_loss(ours, tokens).backward()
            with nullcontext() if is_last else ddp.no_sync():
                gpt_loss(ddp, tokens).backward()
            if not is_last:
                assert all(parameter.grad is None for parameter in ours.parameters())
        assert_bit_equal(full_gradients(ours), full_gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_bit_equal(full_parameters(ours), full_parameters(plain))


def test_accumulation_without_sync_equals_ddp_no_sync() -> None:
    run_ranks(check_accumulation_without_sync, 2, 3)


def sharded_branches(**options: Any) -> nn.Module:
    model = make(Branches)
    return shard_units(model, model.branches.values(), **options)


def check_no_sync_gradient_of_a_parameter_not_used_later() -> None:
    ours, plain = sharded_branches(), make(Branches)
    x = inputs_of(0, dist.get_rank(), 4)
    ours.set_requires_gradient_sync(False)
    ours(x, "a").sum().backward()
    ours.set_requires_gradient_sync(True)
    ours(x, "b").sum().backward()
    plain(x, "a").sum().backward()
    plain(x, "b").sum().backward()
    assert_bit_equal(full_gradients(ours), averaged_gradients(plain))


def test_no_sync_gradient_arrives_though_its_parameter_is_unused_in_the_last_batch() -> None:
    run_ranks(check_no_sync_gradient_of_a_parameter_not_used_later, 2)


def freeze_some(model: nn.Module) -> None:
    """One whole unit, part of another, and part of the root."""
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    model.position.requires_grad_(False)


def check_frozen() -> None:
    ours, plain = make(TinyGPT), make(TinyGPT)
    freeze_some(ours)
    freeze_some(plain)
    shard_units(ours, ours.blocks)
    start = full_parameters(plain)
    losses, parameters = train_gpt(ours, ours, "adamw", 5)
    ddp_losses, ddp_parameters = train_gpt(plain, DistributedDataParallel(plain), "adamw", 5)
    assert losses == ddp_losses
    assert_bit_equal(parameters, ddp_parameters)
    frozen = [name for name, p in plain.named_parameters() if not p.requires_grad]
    assert len(frozen) == 13  # 11 of the first block, up.weight, position
    assert_bit_equal({n: parameters[n] for n in frozen}, {n: start[n] for n in frozen})
    assert [n for n, p in ours.named_parameters() if not p.requires_grad] == frozen


def test_frozen_parameters_do_not_move_and_the_others_equal_ddp() -> None:
    run_ranks(check_frozen, 2)


def train_branches(
    model: nn.Module, forward: nn.Module, used_at: Callable[[int], list[str]]
) -> tuple[Tensors, Tensors]:
    """Gradients of the last step and parameters after four."""
    optimizer = make_optimizer("adamw", model)
    for step in range(4):
        optimizer.zero_grad()
        forward(inputs_of(step, dist.get_rank(), 4), *used_at(step)).square().sum().backward()
        optimizer.step()
    return full_gradients(model), full_parameters(model)


def only_a_and_b(step: int) -> list[str]:
    return ["a", "b"]


def a_everywhere_b_on_rank_0(step: int) -> list[str]:
    return ["a", "b"] if dist.get_rank() == 0 else ["a"]


def one_branch_for_each_rank(step: int) -> list[str]:
    return [["a", "b", "c"][(dist.get_rank() + step) % 2]]


def check_unused(used_at: Callable[[int], list[str]], units: str) -> tuple[Tensors, Tensors]:
    ours, plain = make(Branches), make(Branches)
    # "each": every branch is a unit that may be skipped. "root": parameters of one unit.
    shard_units(ours, ours.branches.values() if units == "each" else [])
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    gradients, parameters = train_branches(ours, ours, used_at)
    ddp_gradients, ddp_parameters = train_branches(plain, ddp, used_at)
    assert_bit_equal(gradients, ddp_gradients)
    assert_bit_equal(parameters, ddp_parameters)
    return gradients, parameters


@pytest.mark.parametrize("units", ["each", "root"])
def test_parameters_unused_on_all_ranks_keep_no_gradient_and_do_not_move(units: str) -> None:
    for gradients, parameters in run_ranks(check_unused, 2, only_a_and_b, units, timeout_s=15):
        assert gradients["branches.c.weight"] is None
        assert gradients["branches.b.weight"] is not None
        assert torch.equal(parameters["branches.c.weight"], make(Branches).branches["c"].weight)


@pytest.mark.parametrize("units", ["each", "root"])
@pytest.mark.parametrize("used_at", [a_everywhere_b_on_rank_0, one_branch_for_each_rank])
def test_parameters_unused_on_some_ranks_get_the_others_gradients(
    used_at: Callable[[int], list[str]], units: str
) -> None:
    run_ranks(check_unused, 2, used_at, units, timeout_s=15)


def gradient_after_all_were_used(unused: str, ranks_using_b: list[int]) -> float | None:
    """Sum of the gradient of b's bias in step 2, where b was used by everyone in step 1."""
    model = fully_shard(make(Branches), unused=unused)
    x = torch.ones(3, 4)
    model(x, "a", "b", "c").sum().backward()
    model.zero_grad()
    names = ["a", "b", "c"] if dist.get_rank() in ranks_using_b else ["a", "c"]
    hidden = model(x, *names).sum()
    hidden.backward()
    gradient = full_gradients(model)["branches.b.bias"]
    return None if gradient is None else gradient.abs().sum().item()


def test_parameter_that_goes_missing_later_contributes_zeros() -> None:
    half = run_ranks(gradient_after_all_were_used, 2, "auto", [0], timeout_s=15)
    whole = run_ranks(gradient_after_all_were_used, 2, "auto", [0, 1])
    assert whole[0] is not None
    assert whole[0] > 0
    assert half == [whole[0] / 2] * 2  # both ranks have the same input


def test_parameter_that_no_rank_uses_any_more_keeps_no_gradient() -> None:
    assert run_ranks(gradient_after_all_were_used, 2, "auto", []) == [None, None]


def test_unused_zeros_makes_zeros() -> None:
    assert run_ranks(gradient_after_all_were_used, 2, "zeros", []) == [0.0, 0.0]


def odd_run(model: nn.Module) -> Tensor:
    return model(inputs_of(0, dist.get_rank(), 3)).square().sum()


def make_odd() -> nn.Module:
    return make(OddParameters)


def check_odd_parameters() -> None:
    assert_gradients_like_plain(make_odd, lambda model: [], odd_run)


def test_scalar_transposed_and_mixed_dtype_parameters_train() -> None:
    run_ranks(check_odd_parameters, 2)


def train_in_bf16(shard: Callable[..., Any], reduce_dtype: torch.dtype | None) -> Run:
    model = make(TinyGPT)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        shard(block, mp_policy=policy)
    shard(model, mp_policy=policy)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    return train_gpt(model, model, "sgd", 10)


def train_in_bf16_ours_and_fsdp2(reduce_dtype: torch.dtype | None) -> tuple[Run, Run]:
    return train_in_bf16(fully_shard, reduce_dtype), train_in_bf16(torch_fully_shard, reduce_dtype)


def test_bf16_compute_with_fp32_reduction_is_bit_equal_to_fsdp2() -> None:
    for (losses, parameters), (expected_losses, expected) in run_ranks(
        train_in_bf16_ours_and_fsdp2, 2, torch.float32
    ):
        assert losses == expected_losses
        assert_bit_equal(parameters, expected)


def test_bf16_compute_and_reduction_is_close_to_fsdp2() -> None:
    for (losses, parameters), (expected_losses, expected) in run_ranks(
        train_in_bf16_ours_and_fsdp2, 2, None
    ):
        # A sum of bf16 may be made in fp32: it differs by half a unit of 2^-8 a gradient.
        assert losses[0] == expected_losses[0]
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=0.02)
        torch.testing.assert_close(parameters, expected, rtol=0, atol=0.02)


def dtypes_in_mixed_precision() -> tuple[torch.dtype, ...]:
    seen: list[torch.dtype] = []
    model = make(MLP)
    model.layers[0].register_forward_pre_hook(
        lambda module, args: seen.extend([module.weight.dtype, args[0].dtype])
    )
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
    )
    shard_units(model, model.layers, mp_policy=policy)
    out = model(torch.ones(2, 5))
    out.sum().backward()
    weight = model.layers[0].weight
    assert weight.grad is not None
    return (*seen, out.dtype, weight.dtype, weight.grad.dtype)


def test_mixed_precision_computes_in_bf16_and_keeps_fp32_masters() -> None:
    expected = (torch.bfloat16, torch.bfloat16, torch.float64, torch.float32, torch.float32)
    assert run_ranks(dtypes_in_mixed_precision, 2) == [expected] * 2
