"""Losses on a gradient by inputs (``create_graph=True``), as other projects write them.

Forces of molecules (MACE, NequIP, SchNet), gradient penalties (WGAN-GP, R1 of StyleGAN), equations
(physics-informed networks), and score matching.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

from .test_backward_in_forward import OPTIONS as OF_INNER
from .test_backward_in_forward import STEPS, WIDTH, Block, batch, part_of

OPTIONS = {**OF_INNER, "not reshard_after_forward": {"reshard_after_forward": False}}


class Messages(Block):
    """Returns two tensors, one of which is made from the other."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, self.linear(x).square().sum(-1)


class Linear(Block):
    """Nothing in it is curved, so no second derivative comes back through its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Net(nn.Module):
    def __init__(self, kinds: tuple[type[Block], ...] = (Block, Block)) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList([kind() for kind in kinds])
        self.recomputes = False

    def energy(self, x: Tensor) -> Tensor:
        x, more = self.first(x), torch.zeros(len(x), dtype=x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            if isinstance(x, tuple):
                x, parts = x
                more = more + parts
        return self.last(x)[:, 0] + more

    def forward(self, x: Tensor) -> Any:
        return self.energy(x)


class Forces(Net):
    """Energy and forces of a batch, the forces by a backward inside of the forward."""

    def forward(self, x: Tensor) -> Any:
        place = x.detach().requires_grad_()
        trains = torch.is_grad_enabled()
        with torch.enable_grad():  # also in validation
            energy = self.energy(place)
            (slope,) = torch.autograd.grad(energy.sum(), place, create_graph=trains)
        return energy, -slope


def energies_and_forces(model: nn.Module, x: Tensor) -> Tensor:
    energy, forces = model(x)
    return energy.square().mean() + (forces - x.sin()).square().mean()


def forces_only(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x)[1] - x.sin()).square().mean()


def validated(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model(x)
    return forces_only(model, x)


def wgan_gp(model: nn.Module, x: Tensor) -> Tensor:
    mixed = (0.3 * x + 0.7 * x.flip(1)).requires_grad_()
    (slope,) = torch.autograd.grad(
        outputs=model(mixed).sum(),
        inputs=mixed,
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )
    penalty = (slope.norm(2, dim=1) - 1).square().mean()
    return (model(x) - model(x.flip(1))).mean() + 10 * penalty


def r1(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return nn.functional.softplus(-out).mean() + slope.square().sum(1).mean() * 5


def equation(model: nn.Module, x: Tensor) -> Tensor:
    """The second derivative by an input is in the loss: three backwards through the graph."""
    x = x.clone().requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (second[:, 0] + first[:, 1] - x[:, 0].detach().sin()).square().mean()


def score_matching(model: nn.Module, x: Tensor) -> Tensor:
    """Sliced: a gradient of the product of the gradient with a vector."""
    x = x.clone().requires_grad_()
    v = x.detach().cos()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad((slope * v).sum(), x, create_graph=True)
    return ((curve * v).sum(1) + 0.5 * (slope * v).sum(1).square()).mean()


def in_two_backwards(model: nn.Module, x: Tensor) -> Tensor:
    """The loss first, and then its penalty, which adds to the gradients."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.mean().backward(retain_graph=True)
    x.grad = None
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return slope.square().mean()


def train(model: nn.Module, x: Callable[[int], Tensor], loss: Callable[..., Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for step in range(STEPS):
        loss(model, x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def check(
    make: Callable[[], Net],
    loss: Callable[..., Tensor],
    options: dict[str, Any],
    *,
    units: bool,
    recomputes: bool = False,
) -> None:
    torch.manual_seed(1)
    plain = make().double()
    torch.manual_seed(1)
    sharded = make().double()
    plain.recomputes = sharded.recomputes = recomputes
    for block in sharded.blocks if units else ():
        fully_shard(block, **options)
    fully_shard(sharded, **options)
    train(plain, batch, loss)
    train(sharded, part_of, loss)
    for name, param in sharded.named_parameters():
        torch.testing.assert_close(
            param.full_tensor(),  # type: ignore[attr-defined]
            plain.get_parameter(name),
            rtol=1e-9,
            atol=1e-10,
            msg=lambda text, name=name: f"{getattr(loss, '__name__', loss)} {name}: {text}",
        )


OUTSIDE = [r1, wgan_gp, equation, score_matching, in_two_backwards]
INSIDE = [energies_and_forces, forces_only, validated]
KINDS: dict[str, tuple[type[Block], ...]] = {
    "blocks": (Block, Block, Block),
    "several outputs": (Messages, Messages),
    "linear": (Linear, Block, Linear),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("units", [True, False], ids=["units", "root only"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_is_that_of_one_process(options: dict[str, Any], units: bool) -> None:
    run_ranks(check_all, 2, options, units)


def check_all(options: dict[str, Any], units: bool) -> None:
    """Each loss on a model of one kind; the three samples have another kind each for it."""
    first = [*OPTIONS.values()].index(options)
    for number, loss in enumerate(OUTSIDE + INSIDE):
        kinds = [*KINDS.values()][(number + first) % len(KINDS)]
        net = Forces if loss in INSIDE else Net
        check(partial(net, kinds), loss, options, units=units)


def test_so_it_is_with_recomputation() -> None:
    run_ranks(check_recomputed, 2)


def check_recomputed() -> None:
    for loss in OUTSIDE:
        check(Net, loss, {}, units=True, recomputes=True)
    check(Forces, energies_and_forces, {}, units=True, recomputes=True)


def test_so_it_is_with_replicas() -> None:
    run_ranks(check_with_replicas, 4)


def check_with_replicas() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for loss in (r1, equation):
        check(Net, loss, {"mesh": mesh}, units=True)
    check(Forces, energies_and_forces, {"mesh": mesh}, units=True)


def reduces_once(options: dict[str, Any]) -> None:
    """Hooks on parameters run once a step, although a step has three backwards."""
    model = Net().double()
    for block in model.blocks:
        fully_shard(block, unused="zeros", **options)
    fully_shard(model, unused="zeros", **options)
    calls: list[Tensor] = []
    params = list(model.parameters())
    for param in params:
        param.register_post_accumulate_grad_hook(calls.append)
    for accumulates in (True, False):
        model.set_requires_gradient_sync(not accumulates)
        equation(model, part_of(0)).backward()
        assert len(calls) == (0 if accumulates else len(params))


@pytest.mark.parametrize("options", [{}, {"sharding": "ddp"}, {"sharding": "zero1"}], ids=str)
def test_an_inner_backward_reduces_nothing(options: dict[str, Any]) -> None:
    run_ranks(reduces_once, 2, options)


def trains_another_within() -> None:
    """A hook in a backward by inputs runs the whole backward of another model."""
    first, other = fully_shard(Net().double()), fully_shard(Net().double())
    x = part_of(0).requires_grad_()
    out, loss = first(x), other(part_of(1)).sum()
    out.register_hook(lambda _: loss.backward())
    torch.autograd.grad(out.sum(), x)
    assert all(param.grad is None for param in first.parameters())
    found = [param.grad.full_tensor() for param in other.parameters()]  # type: ignore[union-attr]
    other.zero_grad()
    other(part_of(1)).sum().backward()
    for grad, param in zip(found, other.parameters(), strict=True):
        torch.testing.assert_close(grad, param.grad.full_tensor())  # type: ignore[union-attr]


def test_a_backward_within_one_by_inputs_reduces() -> None:
    run_ranks(trains_another_within, 2)


def refused() -> None:
    model = fully_shard(Net().double())
    params = list(model.parameters())
    with pytest.raises(NotImplementedError, match=r"create_graph=True for the gradient by '"):
        torch.autograd.grad(model(part_of(0)).sum(), params, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"create_graph=True for the gradient by '"):
        model(part_of(0)).sum().backward(create_graph=True)
    model(part_of(0)).sum().backward()  # it goes on
    assert all(param.grad is not None for param in params)


def test_a_graph_of_gradients_by_parameters_is_refused() -> None:
    run_ranks(refused, 2)
