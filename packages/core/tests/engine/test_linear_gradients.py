"""Weight gradients of linear layers, computed straight into the buffer: same bits, fewer copies."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import fully_shard
from vescale_fsdp.engine.unit import unit_of
from vescale_fsdp.testing import run_ranks

from .helpers import Tensors, assert_bit_equal, full_gradients, shard_units
from .models import LENGTH, MLP, VOCAB, WIDTH, Block, TinyGPT, gpt_loss, make, tokens_of
from .recorders import Recorder

WORLD_SIZE = 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

Run = Callable[[nn.Module], object]


class Repeated(nn.Module):
    """One layer that runs three times, between two that run once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, WIDTH] -> [batch, length, 1]
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.narrow(x)


class Checkpointed(TinyGPT):
    """Its blocks run again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(num_blocks=1)
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))


class Checkpointing(Block):
    """Runs a part of itself again in backward, inside of the unit."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(getattr(model, "blocks", []))


def normal(step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(shape, generator=generator)


def gradients_with(
    enable: bool, make_model: Callable[[], nn.Module], run: Run, **options: Any
) -> Tensors:
    """Those that ``run`` leaves, with the switch on or off."""
    model = make_model()
    shard_units(model, blocks_of(model), **options)
    model.set_linear_gradients_in_place(enable)
    run(model)
    return full_gradients(model)


def assert_same_bits(make_model: Callable[[], nn.Module], run: Run, **options: Any) -> None:
    on, off = (gradients_with(each, make_model, run, **options) for each in (True, False))
    assert any(gradient is not None and gradient.any() for gradient in off.values())
    assert_bit_equal(on, off)


def train_gpt(model: nn.Module, steps: int = 2) -> None:
    for step in range(steps):
        gpt_loss(model, tokens_of(step, dist.get_rank())).backward()


def accumulate_gpt(model: nn.Module) -> None:
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        gpt_loss(model, tokens_of(step, dist.get_rank())).backward()


def accumulate_repeated(model: nn.Module) -> None:
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model(normal(step, 2, 5, WIDTH)).square().mean().backward()


def freeze_some(model: nn.Module) -> None:
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
        block.qkv.weight.requires_grad_(False)
    train_gpt(model)


def under_autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = gpt_loss(model, tokens_of(0, dist.get_rank()))
    loss.backward()


def check_same_bits() -> None:
    gpt = functools.partial(make, TinyGPT, 1)
    repeated = functools.partial(make, Repeated)
    for policy in (MixedPrecisionPolicy(), BF16):
        assert_same_bits(gpt, train_gpt, mp_policy=policy)
        assert_same_bits(gpt, accumulate_gpt, mp_policy=policy)
    for policy in (MixedPrecisionPolicy(), BF16, ALL_BF16):
        assert_same_bits(repeated, accumulate_repeated, mp_policy=policy)
    for use_reentrant in (True, False):
        assert_same_bits(functools.partial(make, Checkpointed, use_reentrant), train_gpt)
    assert_same_bits(functools.partial(make, Checkpointing), lambda m: m(rows()).sum().backward())
    assert_same_bits(gpt, freeze_some)
    assert_same_bits(gpt, under_autocast)
    assert_same_bits(gpt, train_gpt, reshard_after_forward=False)


def rows() -> Tensor:
    return normal(0, 2, LENGTH, WIDTH).requires_grad_()


def test_gradients_have_the_same_bits_with_and_without() -> None:
    run_ranks(check_same_bits, WORLD_SIZE)


def weights_of(model: nn.Module) -> int:
    """Elements of the weights of linear layers that are not tied."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return sum(
        each.in_features * each.out_features for each in linears if each.out_features != VOCAB
    )


def copied_by(model: nn.Module, run: Run) -> int:
    with Recorder() as recorder:
        run(model)
    return recorder.num_copied


def one_pass(model: nn.Module) -> None:
    train_gpt(model, steps=1)


def check_copies() -> None:
    model = make(TinyGPT)
    shard_units(model, model.blocks)
    one_pass(model)
    before = copied_by(model, one_pass)
    model.set_linear_gradients_in_place()
    assert before - copied_by(model, one_pass) == weights_of(model)
    model.set_linear_gradients_in_place(False)
    assert copied_by(model, one_pass) == before
    model.set_linear_gradients_in_place(recurse=False)  # the root's head is tied
    assert copied_by(model, one_pass) == before
    check_fallbacks()


def check_fallbacks() -> None:
    """Where the copy is still made: nothing else would be right."""
    model = make(MLP, 1, WIDTH)
    fully_shard(model)
    model.set_linear_gradients_in_place()
    (linear,) = model.layers
    x = normal(0, 3, WIDTH)

    def copied(input: Tensor, before: Callable[[nn.Linear], object] = id) -> int:
        def run(_: nn.Module) -> None:
            handle = linear.register_forward_pre_hook(lambda module, _: (before(module), None)[1])
            model(input).sum().backward()
            handle.remove()

        return copied_by(model, run)

    few = copied(x)  # the first pass
    few = copied(x)
    weight = linear.weight.numel()
    assert copied(normal(0, WIDTH, 3).t()) == few + weight
    assert copied(x[0]) == few + weight
    seen: list[str] = []
    hooked = copied(x, lambda module: module.weight.register_hook(lambda g: seen.append("grad")))
    assert (hooked, seen) == (few + weight, ["grad"])


def test_no_weight_gradient_is_copied_where_nothing_stands_against_it() -> None:
    run_ranks(check_copies, WORLD_SIZE)


def check_grad() -> None:
    model = make(MLP, 2, WIDTH)
    fully_shard(model, reshard_after_forward=False)
    model.set_linear_gradients_in_place()
    x = normal(0, 3, WIDTH).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert gradient.any()
    assert all(parameter.grad is None for parameter in model.parameters())
    model(x).sum().backward()
    expected = full_gradients(model)
    model.zero_grad()
    torch.autograd.grad(model(x).sum(), x)
    model(x).sum().backward()
    assert_bit_equal(full_gradients(model), expected)  # nothing was left in the buffer


def check_left_to_autograd() -> None:
    off, on = (compiled_gradients(each) for each in (False, True))
    assert_bit_equal(on, off)
    on, off = (gradients_of_tangent(each) for each in (True, False))
    assert_bit_equal(on, off)


def gradients_of_tangent(enable: bool) -> Tensors:
    model = make(MLP, 2, WIDTH)
    fully_shard(model)
    model.set_linear_gradients_in_place(enable)
    x = normal(0, 3, WIDTH)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.flip(0)))).tangent
        tangent.sum().backward()
    return full_gradients(model)


def compiled_gradients(enable: bool) -> Tensors:
    model = make(MLP, 2, WIDTH)
    fully_shard(model)
    model.set_linear_gradients_in_place(enable)
    model.compile(backend="eager")
    for _ in range(2):
        model(normal(0, 3, WIDTH)).sum().backward()
    return full_gradients(model)


def test_a_backward_that_wants_no_weight_gradient_leaves_none() -> None:
    run_ranks(check_grad, WORLD_SIZE)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_compiled_models_and_tangents_are_left_to_autograd() -> None:
    run_ranks(check_left_to_autograd, WORLD_SIZE)


def check_twin() -> None:
    model = make(TinyGPT)
    shard_units(model, model.blocks)
    names = list(model.state_dict())
    model.set_linear_gradients_in_place()
    assert list(model.state_dict()) == names
    one_pass(model)
    twin = copy.deepcopy(model)
    few = copied_by(model, one_pass)
    one_pass(twin)
    assert copied_by(twin, one_pass) == few
    lone = copy.deepcopy(model.blocks[0].up)
    assert lone.forward._linear() is lone
    model.set_linear_gradients_in_place(False)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert unit_of(twin.blocks[0]).linear_gradients_in_place
    assert_bit_equal(full_gradients_after_reset(twin), full_gradients_after_reset(model))


def full_gradients_after_reset(model: nn.Module) -> Tensors:
    model.zero_grad()
    one_pass(model)
    return full_gradients(model)


def test_a_copied_model_writes_to_buffers_of_its_own() -> None:
    run_ranks(check_twin, WORLD_SIZE)
