"""Freezing and unfreezing while gradients wait, between passes, and with other reductions."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp import QuantizedReduce, RankMismatchError, clip_grad_norm_, fully_shard
from vescale_fsdp.engine import reducing
from vescale_fsdp.engine.quantized import ErrorFeedback
from vescale_fsdp.optim import flatten_
from vescale_fsdp.testing import RankError, run_ranks

from .helpers import assert_bit_equal, full_gradients, full_parameters
from .test_frozen import MLP, check_gradients, inputs, is_any, is_bias, made, set_trainable, sharded

Plan = Callable[[str], bool]


def not_first(name: str) -> bool:
    return not name.startswith("0.in_proj.weight")


# While gradients wait

PLANS: list[list[Plan]] = [
    [is_any, is_bias, is_any],
    [is_bias, is_any, is_bias],
    [is_bias, not_first, lambda _: False],
    [not_first, is_any, lambda name: not name.startswith("0")],  # a whole group
]


def backward(model: nn.Module, step: int) -> None:
    model(inputs(step, 5)).square().sum().backward()


def check_accumulation(options: dict[str, Any]) -> None:
    """Three micro-batches, of which the last is reduced; then one step more."""
    for plans in PLANS:
        plain = made(5)
        model = sharded(copy.deepcopy(plain), **options)
        for step, plan in enumerate([*plans, plans[0]]):
            is_last, bits = step >= 2, "sharding" not in options
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            if step == 3:
                check_gradients(model, plain, bits)
                plain.zero_grad()
                model.zero_grad()
            for each in (plain, model):
                set_trainable(each, plan)
                if any(p.requires_grad for p in each.parameters()):
                    backward(each, step)
            if step == 2 and not any(p.requires_grad for p in model.parameters()):
                for param in model.parameters():  # nothing has run a backward that reduces
                    param.requires_grad_(True)
                (model(inputs(9, 5)).sum() * 0).backward()
                for param in plain.parameters():
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        check_gradients(model, plain, bits)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_that_wait_are_kept(world_size: int) -> None:
    run_ranks(check_accumulation, world_size, {}, timeout_s=120)


def test_gradients_that_wait_in_shards_are_kept() -> None:
    run_ranks(check_accumulation, 2, {"sharding": "zero2"}, timeout_s=120)


def check_waiting_sums(sharding: str) -> None:
    """Gradients that were reduced in each replica wait for the sum over the replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for plans in (*PLANS[:2], PLANS[3]):
        plain = made(5)
        model = sharded(copy.deepcopy(plain), mesh=mesh, sharding=sharding)
        for step, plan in enumerate(plans):
            model.set_requires_all_reduce(step == 2)  # type: ignore[operator]
            for each in (plain, model):
                set_trainable(each, plan)
                backward(each, step)
        check_gradients(model, plain)


@pytest.mark.parametrize("sharding", ["hsdp", "hsdp_zero1"])
def test_sums_that_wait_for_the_replicas_are_kept(sharding: str) -> None:
    run_ranks(check_waiting_sums, 4, sharding, timeout_s=120)


class Skips(nn.Module):
    """Of which some ranks leave out a part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = MLP(5), MLP(5)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        return self.b(x if skips else self.a(x))


def check_waits_on_one_rank() -> None:
    torch.manual_seed(0)
    plain = Skips()
    model = copy.deepcopy(plain)
    for part in (model.a, model.b):
        fully_shard(part)
    fully_shard(model)
    for step, plan in enumerate((is_any, lambda name: name != "a.in_proj.weight")):
        model.set_requires_gradient_sync(step == 1)  # type: ignore[operator]
        for each in (plain, model):
            set_trainable(each, plan)
            each(inputs(step, 5), step == 0 and dist.get_rank() == 1).square().sum().backward()
    check_gradients(model, plain)
    assert model.a.in_proj.weight.grad is not None


def test_a_gradient_that_waits_on_one_rank_is_kept_on_all() -> None:
    run_ranks(check_waits_on_one_rank, 2, timeout_s=60)


# Between passes


def check_between_forwards(options: dict[str, Any]) -> None:
    """A part is frozen for the second of two forwards only, as a discriminator may be."""
    plain = made(5)
    model = sharded(copy.deepcopy(plain), **options)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            first = each(inputs(step, 5))
            set_trainable(each, not_first)
            second = each(first)
            set_trainable(each, is_any)
            (first.sum() + second.square().sum()).backward()
        check_gradients(model, plain)


def check_before_backward(options: dict[str, Any]) -> None:
    """What is frozen between forward and backward gets no gradient, as autograd has it."""
    plain = made(5)
    model = sharded(copy.deepcopy(plain), **options)
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
            set_trainable(each, is_any)
            loss = each(inputs(step, 5)).square().sum()
            set_trainable(each, not_first)
            loss.backward()
        check_gradients(model, plain)
        for each in (plain, model):  # and what was frozen then gets some, without a step between
            each.zero_grad()
            set_trainable(each, is_any)
            backward(each, step)
        check_gradients(model, plain)


def check_without_unsharding() -> None:
    """As `check_between_forwards`, of a unit whose backward needs no weights."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[0].set_unshard_in_backward(False)
    tokens = torch.arange(6)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            first = each(tokens)
            set_trainable(each, lambda name: name != "0.weight")
            second = each(tokens)
            set_trainable(each, is_any)
            (first.sum() + second.square().sum()).backward()
        check_gradients(model, plain)


def check_between_passes() -> None:
    check_without_unsharding()
    for options in ({}, {"reshard_after_forward": False}, {"sharding": "zero1"}):
        check_between_forwards(options)
        check_before_backward(options)


def test_between_forwards_and_before_backward() -> None:
    run_ranks(check_between_passes, 2, timeout_s=120)


class Step(nn.Module):
    """Whose forward is a whole step, as Lightning's ``training_step`` is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, step: int) -> None:
        for plan in (is_bias, not_first):
            set_trainable(self.model, plan)
            backward(self.model, step)


def check_inside_of_a_forward() -> None:
    plain = Step(made(5))
    model = copy.deepcopy(plain)
    for mlp in model.model:  # type: ignore[union-attr]
        fully_shard(mlp)
    fully_shard(model)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(step)
        check_gradients(model, plain)


def test_inside_of_the_forward_of_the_root() -> None:
    run_ranks(check_inside_of_a_forward, 2, timeout_s=60)


def unfreeze_in_backward() -> None:
    model = sharded(made(5))
    backward(model, 0)
    late = model[0].in_proj.weight

    def unfreeze(_: Tensor) -> None:
        late.requires_grad_(True)

    model[1].register_forward_hook(lambda _, args, output: output.register_hook(unfreeze) and None)
    loss = model(inputs(0, 5)).sum()
    late.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'0.in_proj.weight' was unfrozen while a backward ran"):
        loss.backward()


def test_unfreezing_in_a_backward_is_refused() -> None:
    run_ranks(unfreeze_in_backward, 2, timeout_s=60)


# Where ranks disagree


def freeze_another() -> None:
    model = sharded(made(5))
    backward(model, 0)
    other = f"0.{('in', 'out')[dist.get_rank()]}_proj.bias"
    set_trainable(model, lambda name: name != other)
    text = r"frozen parameters: rank 0 has .*'0.in_proj.bias'.* and rank 1 has .*'0.out_proj.bias'"
    with pytest.raises(RankMismatchError, match=text):
        backward(model, 1)


def test_ranks_that_freeze_different_parameters_are_told() -> None:
    run_ranks(freeze_another, 2, timeout_s=60)


def count_exchanges() -> list[int]:
    """How often ranks compare flags: after a change, and not while micro-batches wait."""
    calls: list[list[str]] = []
    original = reducing.agree_on_frozen

    def counting(changed: list[str], *args: Any) -> None:
        calls.append(changed)
        original(changed, *args)

    reducing.agree_on_frozen = counting
    try:
        model, found = sharded(made(5)), []
        for step, plan in enumerate((is_any, is_bias, is_bias, not_first, is_any, is_any)):
            set_trainable(model, plan)
            for is_last in (False, False, True):
                model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                backward(model, step)
            found.append(len(calls))
    finally:
        reducing.agree_on_frozen = original
    return found


def test_flags_are_compared_when_they_have_changed() -> None:
    assert run_ranks(count_exchanges, 2, timeout_s=60) == [[0, 1, 1, 2, 3, 3]] * 2


def freeze_on_one_rank() -> None:
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = "2"
    model = sharded(made(5))
    backward(model, 0)
    if dist.get_rank() == 0:
        model[1].in_proj.bias.requires_grad_(False)
    backward(model, 1)


def test_a_rank_that_alone_freezes_something_is_told() -> None:
    text = r"rank 0: RankMismatchError(?s:.)*have changed on this rank.*'1.in_proj.bias'"
    with pytest.raises(RankError, match=text):
        run_ranks(freeze_on_one_rank, 2, timeout_s=60)


# Other ways to reduce


def reduced(freeze_first: bool, world: int, options: dict[str, Any], steps: int = 4) -> Any:
    """Gradients of steps in which only weights of out_proj are trainable."""
    torch.manual_seed(0)
    model = made(16)

    def wanted(name: str) -> bool:
        return name.endswith("out_proj.weight")

    if freeze_first:
        set_trainable(model, wanted)
    sharded(model, **options)
    set_trainable(model, wanted)
    found = []
    for step in range(steps):
        model.zero_grad()
        model(inputs(step, 16)).square().sum().backward()
        found.append(full_gradients(model))
    return found, {n: e.clone() for n, e in ErrorFeedback(model).tensors().items()}


def check_eight_bits(options: dict[str, Any]) -> None:
    world = dist.get_world_size()
    (late, late_errors), (early, early_errors) = (
        reduced(first, world, options) for first in (False, True)
    )
    for ours, expected in zip(late, early, strict=True):
        assert_bit_equal(ours, expected)
    names = {name for name in early_errors if name.endswith("out_proj.weight")}
    assert set(late_errors) == names
    assert_bit_equal(
        {n: late_errors[n] for n in sorted(names)}, {n: early_errors[n] for n in sorted(names)}
    )


def eight_bit_options(error_feedback: bool) -> dict[str, Any]:
    reduce = QuantizedReduce(block=32, error_feedback=error_feedback)
    return {"reduce_codec": reduce}


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_in_eight_bits(world_size: int, error_feedback: bool) -> None:
    run_ranks(check_eight_bits, world_size, eight_bit_options(error_feedback), timeout_s=60)


def check_errors_follow() -> None:
    """What rounding has taken stays with its tensor when the others come and go."""
    model = sharded(made(16), **eight_bit_options(True))
    model(inputs(0, 16)).square().sum().backward()
    before = {n: e.clone() for n, e in ErrorFeedback(model).tensors().items()}

    def settled(plan: Plan) -> dict[str, Tensor]:
        set_trainable(model, plan)
        for mlp in model:
            for group in mlp._unit().groups:  # type: ignore[operator]
                group.gradients.settle(waits=False)
        return {n: e.clone() for n, e in ErrorFeedback(model).tensors().items()}

    some = settled(not_first)
    assert_bit_equal(dict(some), {n: before[n] for n in some})
    assert set(before) - set(some) == {"0.in_proj.weight"} & set(before)
    back = settled(is_any)
    for name, error in back.items():
        assert torch.equal(error, before[name] if name in some else torch.zeros_like(error))


def test_errors_of_rounding_stay_with_their_tensors() -> None:
    run_ranks(check_errors_follow, 3, timeout_s=60)


def check_others() -> None:
    for options in (
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.bfloat16)},
    ):
        (late, _), (early, _) = (reduced(first, 2, options) for first in (False, True))
        for ours, expected in zip(late, early, strict=True):
            assert_bit_equal(ours, expected)


def test_mixed_precision() -> None:
    run_ranks(check_others, 2, timeout_s=60)


def check_factors_and_hooks() -> None:
    plain = made(5)
    model = sharded(copy.deepcopy(plain))
    sizes: list[int] = []

    def hook(shard: Tensor) -> None:
        sizes.append(shard.numel())
        shard.mul_(2.0)

    for mlp in model:
        mlp.set_gradient_divide_factor(8.0)  # type: ignore[operator]
        mlp.set_all_reduce_hook(hook)  # type: ignore[operator]
    for step, plan in enumerate((is_any, is_bias, not_first)):
        for each in (plain, model):
            set_trainable(each, plan)
            each.zero_grad()
            backward(each, step)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(2.0)  # 8 / 2 instead of the 2 ranks of an average
        check_gradients(model, plain)
    assert sizes[0] == sizes[1] == sizes[2] > 5 * max(sizes[3:6])
    assert sizes[6:8] == sizes[:2]


def test_factors_and_hooks() -> None:
    run_ranks(check_factors_and_hooks, 2, timeout_s=60)


# Optimizers


def train(model: nn.Module, optimizer: Any, clips: Any) -> None:
    plans: list[Plan] = [is_any, is_bias, is_bias, not_first, is_any]
    for step, plan in enumerate(plans):
        set_trainable(model, plan)
        optimizer.zero_grad()
        model(inputs(step, 8)).square().mean().backward()
        clips(model.parameters(), 0.05)
        optimizer.step()


def check_optimizers(flat: bool) -> None:
    models = []
    for freeze in (False, True):
        model = sharded(made(8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if flat and freeze:
            flatten_(optimizer)
        train(model, optimizer, clip_grad_norm_ if freeze else nn.utils.clip_grad_norm_)
        models.append(full_parameters(model))
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-6, atol=1e-7)
    plain = made(8)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)

    def average_and_clip(params: Any, max_norm: float) -> None:
        params = list(params)
        for param in params:
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        nn.utils.clip_grad_norm_(params, max_norm)

    train(plain, optimizer, average_and_clip)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(models[1][name], param.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flat", [False, True])
def test_optimizers_and_clipping(flat: bool) -> None:
    run_ranks(check_optimizers, 3, flat, timeout_s=60)


def check_copies() -> None:
    model = sharded(made(5))
    set_trainable(model, is_bias)
    backward(model, 0)
    twin = copy.deepcopy(model)
    model.double()
    model.float()
    for each in (model, twin):
        each.zero_grad()
        backward(each, 1)
    assert_bit_equal(full_gradients(twin), full_gradients(model))
    set_trainable(twin, is_any)
    backward(twin, 2)
    assert all(param.grad is not None for param in twin.parameters())


def test_copies_and_conversions() -> None:
    run_ranks(check_copies, 2, timeout_s=60)
