"""What people put around, into and beside sharded modules, as functions that give numbers.

Each takes ``fully_shard``, or ``alone`` for the same without sharding. The data are the same on all
ranks, so that averages over two ranks round nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .helpers import full_gradients, full_parameters
from .models import make

Shard = Callable[..., Any]

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A layer of the root, then two blocks, which are units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def alone(module: nn.Module, **_: Any) -> nn.Module:
    """Instead of ``fully_shard``: the model stays as it is."""
    return module


def sharded(shard: Shard, model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


def inputs(step: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module, num_steps: int = 3) -> list[Any]:
    """The losses of some steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(num_steps):
        loss = model(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, full_parameters(model)]


# Activation checkpointing


def checkpointed_before(shard: Shard) -> Any:
    model = make(Net)
    for block in model.blocks:
        composable_checkpoint(block)
    return trained(sharded(shard, model))


def checkpointed_after(shard: Shard) -> Any:
    model = sharded(shard, make(Net))
    for block in model.blocks:
        composable_checkpoint(block)
    return trained(model)


def wrapped(shard: Shard, kind: CheckpointImpl, around: bool, **options: Any) -> Any:
    model = make(Net)
    for index, block in enumerate(model.blocks):
        wrap = partial(checkpoint_wrapper, checkpoint_impl=kind, **options)
        model.blocks[index] = wrap(shard(block)) if around else shard(wrap(block))
    return trained(shard(model))


def wrapper_around_unit(shard: Shard) -> Any:
    return wrapped(shard, CheckpointImpl.NO_REENTRANT, True)


def wrapper_in_unit(shard: Shard) -> Any:
    return wrapped(shard, CheckpointImpl.NO_REENTRANT, False)


def reentrant_wrapper_around_unit(shard: Shard) -> Any:
    return wrapped(shard, CheckpointImpl.REENTRANT, True)


def reentrant_wrapper_in_unit(shard: Shard) -> Any:
    return wrapped(shard, CheckpointImpl.REENTRANT, False)


def keep_matrix_products() -> Any:
    def choose(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def selective_around_unit(shard: Shard) -> Any:
    return wrapped(shard, CheckpointImpl.NO_REENTRANT, True, context_fn=keep_matrix_products)


def selective_in_unit(shard: Shard) -> Any:
    return wrapped(shard, CheckpointImpl.NO_REENTRANT, False, context_fn=keep_matrix_products)


class Selective(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=keep_matrix_products)
        return x


def selective_by_function(shard: Shard) -> Any:
    return trained(sharded(shard, make(Selective)))


# Compilation


def compiled_blocks(shard: Shard) -> Any:
    model = make(Net)
    model.blocks[0].compile(backend="aot_eager")
    sharded(shard, model)
    model.blocks[1].compile(backend="aot_eager")
    return trained(model)


def compiled_root(shard: Shard) -> Any:
    model = sharded(shard, make(Net))
    model.compile(backend="aot_eager")
    return trained(model)


# Forward-mode derivatives


def tangents(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Of the outputs, along one direction; and what a training needs of them."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(inputs(0), inputs(1))
        primal, tangent = forward_ad.unpack_dual(model(x))
        (tangent.square().sum() + primal.sum()).backward()
    return primal.detach(), tangent.detach()


def forward_mode(shard: Shard) -> Any:
    model = sharded(shard, make(Net), reshard_after_forward=True)
    return [*tangents(model), full_gradients(model)]


def forward_mode_of_a_kept_root(shard: Shard) -> Any:
    model = sharded(shard, make(Net))
    return [*tangents(model), full_gradients(model), trained(model)]


def forward_mode_of_a_tangent_alone(shard: Shard) -> Any:
    model = sharded(shard, make(Net), reshard_after_forward=True)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(inputs(0).requires_grad_(), inputs(1))
        _, tangent = forward_ad.unpack_dual(model(x))
        tangent.square().sum().backward()
    return [tangent.detach(), full_gradients(model)]


def functional_forward_mode(shard: Shard) -> Any:
    model = sharded(shard, make(Net))
    primal, tangent = torch.func.jvp(model, (inputs(0),), (inputs(1),))
    (tangent.square().sum() + primal.sum()).backward()
    of_each_row = torch.func.vmap(model)(inputs(0))
    return [primal.detach(), tangent.detach(), full_gradients(model), of_each_row.detach()]


# State dicts


def assigned(shard: Shard) -> Any:
    model, other = (sharded(shard, make(Net, seed=seed)) for seed in (0, 1))
    other.load_state_dict(model.state_dict(), assign=True)
    return trained(other)


def loaded_in_part(shard: Shard) -> Any:
    model, other = (sharded(shard, make(Net, seed=seed)) for seed in (0, 1))
    state = model.state_dict()
    state["not.there"] = state.pop("first.bias")
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["first.bias"], ["not.there"])
    return trained(other)


def meta_with_assigned_state(shard: Shard) -> Any:
    with torch.device("meta"):
        model = Net()
    sharded(shard, model)
    model.load_state_dict(sharded(shard, make(Net)).state_dict(), assign=True)
    return trained(model)


def meta_with_state_of_another(shard: Shard) -> Any:
    with torch.device("meta"):
        model = Net()
    sharded(shard, model)
    model.to_empty(device="cpu")
    model.load_state_dict(sharded(shard, make(Net)).state_dict())
    return trained(model)


# Optimizers and several models


def adversaries(shard: Shard) -> Any:
    """Two roots. One is frozen while the other learns through it, and has seen no gradient."""
    generator, critic = (sharded(shard, make(Net, seed=seed)) for seed in (0, 1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
    for step in range(3):
        with torch.no_grad():
            fake = generator(inputs(step))
        (critic(fake).mean() - critic(inputs(step)).mean()).backward()
        optimizers[1].step()
        critic.requires_grad_(False)
        critic(generator(inputs(step))).square().mean().backward()
        critic.requires_grad_(True)
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [full_parameters(generator), full_parameters(critic)]


def optimizer_in_backward(shard: Shard) -> Any:
    model = sharded(shard, make(Net))
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(3):
        model(inputs(step)).square().mean().backward()
        assert all(parameter.grad is None for parameter in optimizers)
    return full_parameters(model)


class WithHead(Net):
    """Its forward leaves the head out: that is called by the user, on one part after another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def loss_in_parts(shard: Shard, of_a_list: bool) -> Any:
    """A backward for each part of the head, then one for the rest."""
    model = make(WithHead)
    shard([model.norm, model.head] if of_a_list else model.head)
    sharded(shard, model)
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        hidden = model(inputs(step))
        cut = hidden.detach().requires_grad_()
        for part in cut.chunk(3):
            loss = model.head(part).square().sum()
            loss.backward()
            losses.append(loss.item())
        hidden.backward(cut.grad)
        optimizer.step()
        optimizer.zero_grad()
    return [losses, full_parameters(model)]


def loss_in_parts_of_a_head(shard: Shard) -> Any:
    return loss_in_parts(shard, False)


def loss_in_parts_of_norm_and_head(shard: Shard) -> Any:
    return loss_in_parts(shard, True)


# Parameters of any kind


class Quantized(nn.Module):
    """Frozen weights of a narrow dtype, with a trained scale."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH) % 7 - 3
        self.narrow = nn.Parameter(values.to(dtype), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(WIDTH) % 2 == 0, requires_grad=False)
        self.scale = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.narrow.to(x.dtype) * self.scale * self.mask


class QuantizedNet(Net):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Quantized(dtype), Block()])


def quantized(shard: Shard, dtype: torch.dtype) -> Any:
    model = sharded(shard, make(QuantizedNet, dtype))
    losses, parameters = trained(model)
    narrow = parameters["blocks.0.narrow"]
    assert narrow.dtype is dtype
    return [losses, {name: value.float() for name, value in parameters.items()}]


def eight_bit_integers(shard: Shard) -> Any:
    return quantized(shard, torch.int8)


def sixty_four_bit_integers(shard: Shard) -> Any:
    return quantized(shard, torch.int64)


def eight_bit_floats(shard: Shard) -> Any:
    return quantized(shard, torch.float8_e4m3fn)


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


class AnyShape(nn.Module):
    """Parameters of no to five dimensions; some without elements, and a unit of only such."""

    SHAPES = ((), (WIDTH,), (0,), (3, WIDTH), (0, WIDTH), (2, 3, WIDTH), (2, 0, 4), (1, 2, 3, 1))

    def __init__(self) -> None:
        super().__init__()
        shapes = (*self.SHAPES, (2, 1, 3, 2, 1))
        self.values = nn.ParameterList([torch.randn(shape) for shape in shapes])
        self.blocks = nn.ModuleList([Empty()])

    def forward(self, x: Tensor) -> Tensor:
        total = sum(value.square().sum() for value in self.values)
        return self.blocks[0](x * total)


class Scripted(Block):
    """Its products are computed by a scripted module without parameters, as in e3nn."""

    def __init__(self) -> None:
        super().__init__()
        self.product = torch.jit.script(Product())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.product(super().forward(x), self.down.weight)


class Product(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight @ weight.t())


def scripted(shard: Shard) -> Any:
    model = make(Net)
    model.blocks = nn.ModuleList([Scripted(), Scripted()])
    return trained(sharded(shard, model))


def any_shape(shard: Shard) -> Any:
    return trained(sharded(shard, make(AnyShape)))
