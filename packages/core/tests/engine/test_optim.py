"""Optimizers, clipping and state dicts work on the shards as they do on whole tensors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vescale_fsdp
from vescale_fsdp.testing import run_ranks

from .helpers import (
    assert_bit_equal,
    averaged_gradients,
    full,
    full_gradients,
    full_parameters,
    shard_units,
)
from .models import MLP, OddParameters, TinyGPT, gpt_loss, inputs_of, make, tokens_of

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}
MODES: dict[str, dict[str, bool]] = {
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def sharded_gpt(seed: int = 0) -> nn.Module:
    model = make(TinyGPT, seed=seed)
    return shard_units(model, model.blocks)


def make_optimizer(model: nn.Module, name: str, mode: str) -> torch.optim.Optimizer:
    optimizer_class, options = OPTIMIZERS[name]
    return optimizer_class(model.parameters(), **options, **MODES[mode])


def step_gpt(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Steps on data that is the same on all ranks, so that no average rounds."""
    for step in range(first, last):
        optimizer.zero_grad()
        gpt_loss(model, tokens_of(step, 0)).backward()
        optimizer.step()


def check_optimizer(name: str, mode: str) -> None:
    ours, plain = sharded_gpt(), make(TinyGPT)
    for model in (ours, plain):
        step_gpt(model, make_optimizer(model, name, mode), 0, 5)
    assert_bit_equal(full_parameters(ours), full_parameters(plain))
    assert not torch.equal(full(ours.norm.weight), make(TinyGPT).norm.weight), "nothing moved"


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizer_on_shards_is_bit_equal_to_unsharded(name: str, mode: str) -> None:
    run_ranks(check_optimizer, 2, name, mode)


def check_more_ranks_than_elements(mode: str) -> None:
    """Some ranks hold nothing of some parameters, or nothing at all."""
    ours, plain = make(OddParameters), make(OddParameters)
    shard_units(ours, [])
    for model in (ours, plain):
        optimizer = make_optimizer(model, "adamw", mode)
        for step in range(3):
            optimizer.zero_grad()
            model(inputs_of(step, 0, 3)).square().sum().backward()
            optimizer.step()
    for name, value in full_parameters(plain).items():
        torch.testing.assert_close(full_parameters(ours)[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", list(MODES))
def test_ranks_without_elements_of_a_parameter_take_part(mode: str) -> None:
    run_ranks(check_more_ranks_than_elements, 4, mode)


def with_gradients(model: nn.Module) -> nn.Module:
    gpt_loss(model, tokens_of(0, dist.get_rank())).backward()
    return model


def averaged_plain() -> nn.Module:
    """A plain model that holds the averaged gradients itself."""
    plain = with_gradients(make(TinyGPT))
    gradients = averaged_gradients(plain)
    for name, parameter in plain.named_parameters():
        parameter.grad = gradients[name]
    return plain


def clip_ours(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    norm = vescale_fsdp.clip_grad_norm_(model, max_norm, norm_type)
    assert type(norm) is Tensor
    return norm


def clip_ours_given_parameters(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    norm = vescale_fsdp.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    assert type(norm) is Tensor
    return norm


def clip_by_torch(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    return full(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type))


def check_clipping(max_norm: float, norm_type: float) -> None:
    plain = averaged_plain()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    for clip in (clip_ours, clip_ours_given_parameters, clip_by_torch):
        ours = with_gradients(sharded_gpt())
        norm = clip(ours, max_norm, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        clipped = full_gradients(ours)
        for name, gradient in full_gradients(plain).items():
            torch.testing.assert_close(clipped[name], gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("max_norm", [1e-2, 1e3])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_uses_the_norm_of_the_whole_gradient(max_norm: float, norm_type: float) -> None:
    # 1e-2 clips and 1e3 does not, whatever the norm.
    run_ranks(check_clipping, 2, max_norm, norm_type)


def check_clipping_in_double() -> None:
    ours, plain = make(MLP).double(), make(MLP).double()
    shard_units(ours, ours.layers)
    x = inputs_of(0, 0).double()
    for each in (ours, plain):
        each(x).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
    norm = vescale_fsdp.clip_grad_norm_(ours, 1e-2)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
    clipped = full_gradients(ours)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(clipped[name], parameter.grad, rtol=1e-13, atol=1e-18)


def test_the_norm_of_float64_gradients_is_summed_in_float64() -> None:
    run_ranks(check_clipping_in_double, 2)


def literal_norm() -> float:
    linear = nn.Linear(2, 1)
    vescale_fsdp.fully_shard(linear)
    linear(torch.tensor([[2.0, 4.0]])).sum().backward()  # gradients: [2, 4] and [1]
    linear(torch.tensor([[0.0, 0.0]])).sum().backward()  # and [0, 0] and [1] more
    return vescale_fsdp.clip_grad_norm_(linear, 1e9).item()


def test_norm_of_a_known_gradient() -> None:
    assert run_ranks(literal_norm, 2) == [pytest.approx(math.sqrt(24))] * 2  # 4 + 16 + 4


def check_non_finite() -> None:
    model = with_gradients(sharded_gpt())
    with torch.no_grad():
        if dist.get_rank() == 1:  # one rank's shard only
            local = next(p for p in model.parameters() if p.grad.to_local().numel())
            local.grad.to_local()[0] = math.nan
        name = next(n for n, p in model.named_parameters() if p.grad.full_tensor().isnan().any())
        place = [n for n, _ in model.named_parameters()].index(name)
    finding = "is nan, so they cannot be clipped: gradients of 1 parameter are not finite: "
    for given, called in ((model, f"'{name}'"), (model.parameters(), f"'parameter {place}'")):
        text = re.escape(f"{finding}{called} has NaN on rank 1.")
        with pytest.raises(vescale_fsdp.NonFiniteError, match=text):
            vescale_fsdp.clip_grad_norm_(given, 1.0, error_if_nonfinite=True)
    assert vescale_fsdp.clip_grad_norm_(model, 1.0).isnan()


def test_nan_in_one_shard_is_an_error_on_every_rank() -> None:
    run_ranks(check_non_finite, 2, timeout_s=10)


def check_state_dict_round_trip() -> None:
    first, second = sharded_gpt(seed=0), sharded_gpt(seed=1)
    plain = make(TinyGPT)
    state = first.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(tensor.shape == plain.state_dict()[name].shape for name, tensor in state.items())
    before = list(second.parameters())
    second.load_state_dict(state)
    assert all(new is old for new, old in zip(second.parameters(), before, strict=True))
    assert_bit_equal(full_parameters(second), full_parameters(plain))
    # The loaded values are the ones that are computed with.
    assert torch.equal(second(tokens_of(0, 0)), plain(tokens_of(0, 0)))
    assert torch.equal(first(tokens_of(0, 0)), plain(tokens_of(0, 0)))


def test_state_dict_loads_into_another_model() -> None:
    run_ranks(check_state_dict_round_trip, 2)


def check_state_dict_aliases_the_shard() -> None:
    model = sharded_gpt()
    state = model.state_dict()
    before = full(state["norm.weight"])
    step_gpt(model, make_optimizer(model, "sgd", "single"), 0, 1)
    assert not torch.equal(full(state["norm.weight"]), before)
    assert torch.equal(full(state["norm.weight"]), full(model.norm.weight))
    # Between forward and backward the full parameters are registered; not in a state dict.
    loss = gpt_loss(model, tokens_of(0, 0))
    assert type(model.state_dict()["norm.weight"]) is type(state["norm.weight"])
    loss.backward()


def test_state_dict_holds_the_live_shards() -> None:
    run_ranks(check_state_dict_aliases_the_shard, 2)


def check_resume(name: str, mode: str) -> None:
    whole = sharded_gpt()
    step_gpt(whole, make_optimizer(whole, name, mode), 0, 5)

    first = sharded_gpt()
    optimizer = make_optimizer(first, name, mode)
    step_gpt(first, optimizer, 0, 3)
    second = sharded_gpt(seed=1)
    second_optimizer = make_optimizer(second, name, mode)
    second.load_state_dict(first.state_dict())
    second_optimizer.load_state_dict(optimizer.state_dict())
    step_gpt(second, second_optimizer, 3, 5)
    assert_bit_equal(full_parameters(second), full_parameters(whole))


@pytest.mark.parametrize(("name", "mode"), [("adamw", "fused"), ("sgd", "foreach")])
def test_training_resumes_from_state_dicts_bit_for_bit(name: str, mode: str) -> None:
    run_ranks(check_resume, 2, name, mode)


def check_zero_grad(set_to_none: bool) -> None:
    ours, plain = make(MLP), make(MLP)
    shard_units(ours, ours.layers)
    for step in range(3):
        x = inputs_of(step, dist.get_rank())
        for model in (ours, plain):
            model.zero_grad(set_to_none=set_to_none)
            if step:
                gradients = full_gradients(model).values()
                assert all(
                    gradient is None if set_to_none else not gradient.any()
                    for gradient in gradients
                )
            model(x).square().mean().backward()
        assert_bit_equal(full_gradients(ours), averaged_gradients(plain))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_right_after_either_kind_of_zero_grad(set_to_none: bool) -> None:
    run_ranks(check_zero_grad, 2, set_to_none)


def check_gradient_set_by_hand() -> None:
    ours, plain = make(MLP), make(MLP)
    shard_units(ours, ours.layers)
    for model in (ours, plain):
        model(inputs_of(0, 0)).mean().backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 2
        model(inputs_of(1, 0)).mean().backward()
    assert_bit_equal(full_gradients(ours), full_gradients(plain))


def test_backward_adds_to_a_gradient_that_the_user_set() -> None:
    run_ranks(check_gradient_set_by_hand, 2)


def check_identity() -> None:
    model = sharded_gpt()
    before = list(model.parameters())
    optimizer = make_optimizer(model, "adamw", "foreach")
    step_gpt(model, optimizer, 0, 2)
    gpt_loss(model, tokens_of(0, 0))  # a forward without backward leaves the root gathered
    model.reshard()
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
    assert all(parameter in optimizer.state for parameter in before)


def test_sharded_parameters_are_the_same_objects_for_life() -> None:
    run_ranks(check_identity, 2)


def check_double() -> None:
    ours, plain = make(MLP), make(MLP).double()
    shard_units(ours, ours.layers)
    ours(inputs_of(0, 0)).mean().backward()
    ours.zero_grad()
    ours.double()
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float64}
    for model in (ours, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(inputs_of(step, 0).double()).square().mean().backward()
            optimizer.step()
    assert_bit_equal(full_parameters(ours), full_parameters(plain))


def test_change_of_dtype_after_sharding_binds_the_shards_again() -> None:
    run_ranks(check_double, 2)


def check_meta_initialisation() -> None:
    with torch.device("meta"):
        model = MLP()
    shard_units(model, model.layers)
    model.to_empty(device="cpu")
    plain = make(MLP)
    with torch.no_grad():
        for parameter in [*model.parameters(), *plain.parameters()]:
            parameter.fill_(0.25)
    for either in (model, plain):
        either(inputs_of(0, 0)).square().mean().backward()
    assert_bit_equal(full_parameters(model), full_parameters(plain))
    assert_bit_equal(full_gradients(model), full_gradients(plain))


def test_model_made_on_meta_trains_after_to_empty() -> None:
    run_ranks(check_meta_initialisation, 2)


def averaged_by_hand() -> None:
    model = vescale_fsdp.fully_shard(nn.Linear(3, 5))
    model(torch.ones(2, 3)).sum().backward()
    for param in model.parameters():
        with pytest.raises(NotImplementedError, match=r"backward has averaged gradients .* leave"):
            dist.all_reduce(param.grad)


def test_a_loop_that_averages_gradients_itself_is_told_to_stop() -> None:
    run_ranks(averaged_by_hand, 2)
