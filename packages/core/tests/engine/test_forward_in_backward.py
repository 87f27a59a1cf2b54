"""Forwards inside of a backward: of another model, in a hook or a custom function, or recomputed.

A model whose own backward runs is recomputed then. Another one makes passes of its own.
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

from .test_backward_in_forward import OPTIONS, STEPS, WIDTH, Base, Block, batch, part_of


class Net(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.through(self.first(x)))


class Relay(torch.autograd.Function):
    """The identity. Its backward calls a function, as adjoint methods and reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[Tensor], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.call(grad)
        return grad, None


class Training:
    """Two models, and an optimizer for each."""

    def __init__(self, shard: Callable[[nn.Module], None]) -> None:
        torch.manual_seed(1)
        self.model, self.other = Net().double(), Net().double()
        shard(self.model)
        shard(self.other)
        self.optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.05) for each in (self.model, self.other)
        ]

    def step(self, number: int) -> None:
        self.optimizers[number].step()
        self.optimizers[number].zero_grad()

    def named(self) -> dict[str, Tensor]:
        pairs = [*self.model.named_parameters(), *self.other.named_parameters(prefix="other")]
        return {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in pairs}


def train_other(training: Training, x: Tensor, _: Tensor) -> None:
    """A whole step of the other model."""
    training.other(x).square().mean().backward()
    assert all(each.grad is not None for each in training.other.parameters())
    training.step(1)


def by_hook(training: Training, x: Tensor) -> None:
    y = training.model(x)
    y.register_hook(lambda grad: within(train_other, training, x, grad))
    y.square().mean().backward()
    training.step(0)


def within(call: Callable[..., None], *args: Any) -> None:
    with torch.enable_grad():
        call(*args)


def by_function(training: Training, x: Tensor) -> None:
    y = Relay.apply(training.model(x), partial(train_other, training, x))
    y.square().mean().backward()
    training.step(0)


def two_forwards(training: Training, x: Tensor) -> None:
    """Of the other model, and one backward of both. Afterwards it trains as usual."""

    def call(grad: Tensor) -> None:
        loss = training.other(x).square().mean() + training.other(x.flip(0)).sin().mean()
        loss.backward()
        training.step(1)

    Relay.apply(training.model(x), call).square().mean().backward()
    training.step(0)
    train_other(training, x, x)


def judged(training: Training, x: Tensor) -> None:
    """The other model weighs the gradient, without a gradient of its own. Then it trains."""

    def weigh(grad: Tensor) -> Tensor:
        with torch.no_grad():
            return grad * training.other(x).sigmoid()

    y = training.model(x)
    y.register_hook(weigh)
    y.square().mean().backward()
    assert all(each.grad is None for each in training.other.parameters())
    training.step(0)
    train_other(training, x, x)


def adjoint(training: Training, x: Tensor) -> None:
    """A function computes the gradient by a forward and a backward of the other model."""

    class Outside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            with torch.no_grad():
                return training.other(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor | None:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                place = x.detach().requires_grad_()
                training.other(place).backward(grad)
            return place.grad

    Outside.apply(training.model(x)).square().mean().backward()
    training.step(0)
    training.step(1)


def whole_recomputed(training: Training, x: Tensor, *, use_reentrant: bool) -> None:
    """The whole model is in a checkpoint, with a plain layer after it, twice."""
    x = x.clone().requires_grad_()

    def region(x: Tensor) -> Tensor:
        return torch.tanh(training.model(x)) * 2

    y = checkpoint(region, x, use_reentrant=use_reentrant)
    y = checkpoint(region, y, use_reentrant=use_reentrant)
    y.square().mean().backward()
    training.step(0)


def both_recomputed(training: Training, x: Tensor, *, use_reentrant: bool) -> None:
    x = x.clone().requires_grad_()
    y = checkpoint(training.model, x, use_reentrant=use_reentrant)
    y = checkpoint(training.other, y, use_reentrant=use_reentrant)
    y.square().mean().backward()
    training.step(0)
    training.step(1)


def broken_off(training: Training, x: Tensor) -> None:
    """The hook raises after a forward of the other model. The next step is a whole one."""

    def fail(_: Tensor) -> None:
        within(training.other, x)
        raise KeyError("in a hook")

    y = training.model(x)
    y.register_hook(fail)
    with pytest.raises(KeyError):
        y.square().mean().backward()
    training.optimizers[0].zero_grad()
    by_hook(training, x)


def frozen(training: Training, x: Tensor) -> None:
    """The gradient of a loss of a frozen model is added, as for guidance."""
    training.other.requires_grad_(False)
    y = training.model(x)

    def guide(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            place = y.detach().requires_grad_()
            loss = training.other(place).square().mean()
            return grad + torch.autograd.grad(loss, place)[0]

    y.register_hook(guide)
    y.square().mean().backward()
    training.step(0)


CASES: dict[str, Callable[[Training, Tensor], None]] = {
    "by hook": by_hook,
    "by function": by_function,
    "two forwards": two_forwards,
    "judged": judged,
    "broken off": broken_off,
    "frozen": frozen,
    "adjoint": adjoint,
    "recomputed": partial(whole_recomputed, use_reentrant=False),
    "recomputed, reentrant": partial(whole_recomputed, use_reentrant=True),
    "both recomputed": partial(both_recomputed, use_reentrant=False),
    "both recomputed, reentrant": partial(both_recomputed, use_reentrant=True),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("units", [True, False], ids=["units", "root only"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.filterwarnings("ignore:one backward has reached")  # two models, of one class
def test_training_is_that_of_one_process(options: dict[str, Any], units: bool) -> None:
    run_ranks(check_all, 2, options, units)


def check_all(options: dict[str, Any], units: bool) -> None:
    def shard(model: nn.Module) -> None:
        for block in [each for each in model.modules() if isinstance(each, Block) and units]:
            fully_shard(block, **options)
        fully_shard(model, **options)

    for name, case in CASES.items():
        plain, sharded = Training(lambda _: None), Training(shard)
        for step in range(STEPS):
            case(plain, batch(step))
            case(sharded, part_of(step))
        compare(name, plain, sharded)
    dist.barrier()


def compare(name: str, plain: Training, sharded: Training) -> None:
    expected = plain.named()
    for fqn, found in sharded.named().items():
        torch.testing.assert_close(
            found,
            expected[fqn],
            rtol=1e-11,
            atol=1e-12,
            msg=lambda text, where=f"{name}, {fqn}": f"{where}: {text}",
        )


def test_gradients_add_up_over_both_kinds_of_passes() -> None:
    run_ranks(check_sums, 2)


def check_sums() -> None:
    """The other model has a forward of its own, whose backward comes after the hook."""

    def run(training: Training, x: Tensor) -> None:
        y = training.model(x)
        y.register_hook(lambda _: within(training_loss, training, x))
        y.square().mean().backward()
        training.other(x.flip(0)).square().mean().backward()
        for number in range(2):
            training.step(number)

    def training_loss(training: Training, x: Tensor) -> None:
        training.other(x).sin().mean().backward()

    def shard(model: nn.Module) -> None:
        fully_shard(model)

    plain, sharded = Training(lambda _: None), Training(shard)
    for step in range(STEPS):
        run(plain, batch(step))
        run(sharded, part_of(step))
    compare("sums", plain, sharded)


class Equilibrium(nn.Module):
    """A fixed point of a unit, and the gradient at it by several backwards through one forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 0.5
        with torch.no_grad():
            z = x
            for _ in range(4):
                z = torch.tanh(self.inner(z)) * 0.5 + x
        return self.last(self.by_hook(z) if self.how == "hook" else Solve.apply(self.inner, z + x))

    def by_hook(self, z: Tensor) -> Tensor:
        """As torchdeq: the hook is on the output that is differentiated in it."""
        z = z.requires_grad_()
        new = self.inner(z)

        def solve(grad: Tensor) -> Tensor:
            handle.remove()
            return solved(new, z, grad)

        handle = new.register_hook(solve)
        return new


def solved(new: Tensor, z: Tensor, grad: Tensor) -> Tensor:
    found = grad
    for _ in range(3):
        found = torch.autograd.grad(new, z, found, retain_graph=True)[0] * 0.3 + grad
    return found


class Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: nn.Module, z: Tensor) -> Tensor:
        ctx.inner = inner
        ctx.save_for_backward(z)
        return z.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        with torch.enable_grad():
            z = ctx.saved_tensors[0].detach().requires_grad_()
            new = ctx.inner(z)
        new.backward(solved(new, z, grad))
        return None, z.grad


@pytest.mark.parametrize("how", ["hook", "function"])
def test_several_backwards_through_one_forward(how: str) -> None:
    run_ranks(check_equilibrium, 2, how)


def check_equilibrium(how: str) -> None:
    for units in (["inner"], ["first", "inner", "last"], ["inner.0", "inner.2"], []):
        models = []
        for is_sharded in (False, True):
            torch.manual_seed(1)
            model = Equilibrium(how).double()
            if is_sharded:
                for name in units:
                    fully_shard(model.get_submodule(name))
                fully_shard(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(STEPS):
                model(part_of(step) if is_sharded else batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(model)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(other.full_tensor(), one, rtol=1e-11, atol=1e-12)
