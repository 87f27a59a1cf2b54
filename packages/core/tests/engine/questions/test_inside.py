"""A backward and an optimizer's step inside of a forward that goes on afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from .asking import (
    CLASSES,
    WIDTH,
    Answers,
    Block,
    Case,
    Cases,
    Net,
    Outcomes,
    answer,
    as_one_process,
    backward,
    check_models,
    check_rests,
    in_settings,
    is_sharded,
    listed,
    named,
    pair,
    part,
    squares,
)
from .asking import batch as whole_batch

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda params: SGD(params, 0.5),
    "SGD, foreach": lambda params: SGD(params, 0.5, foreach=True),
    "SGD, fused": lambda params: SGD(params, 0.02, fused=True),
    "Adam": lambda params: Adam(params, 0.05),
    "AdamW, fused": lambda params: AdamW(params, 0.05, fused=True),
}


class Training(Net):
    """Has an optimizer, which its forward uses."""

    optimizer: Optimizer

    def minimize(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Manual(Training):
    """Three steps, as a ``training_step`` with manual optimization has them."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            loss = super().forward(x).square().mean()
            self.minimize(loss + 0.1 * self.head.weight.square().sum())
        return super().forward(x)


class OwnHead(Training):
    """The root's parameters are used before and after a step, by function and as a module."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x)
        hidden = x.detach()
        F.linear(hidden, self.head.weight, self.head.bias).square().mean().backward()
        self.head(hidden).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.head(x) + self.head.bias


class InEvaluation(Training):
    """Trains inside of a forward that is not trained."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.minimize(super().forward(x).square().mean())
        return super().forward(x)


class WithoutStep(Training):
    """The gradients of the backward inside and of the one outside add up."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x).square().mean().backward()
        return super().forward(x)


class KeptOver(Training):
    """What is computed before a backward is used after it."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.head(x.detach()).square().mean(-1, keepdim=True)
        super().forward(x).square().mean().backward()
        return super().forward(x) + before


class ByInput(Training):
    """A step of the input along its gradient, and a penalty on it."""

    create_graph = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = super().forward(x).square().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=self.create_graph)
        return super().forward(x - 0.1 * slope) + slope.square().sum(-1, keepdim=True)


class ByInputOfSecondOrder(ByInput):
    create_graph = True


class Stop(Exception):
    pass


def stop(gradient: Tensor) -> None:
    raise Stop


class Fails(Training):
    """A backward inside raises an error, which is caught, and the forward goes on."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        hidden = self.blocks[1](self.blocks[0](x))
        hidden.register_hook(stop)
        with pytest.raises(Stop):
            self.head(self.blocks[2](hidden)).square().mean().backward()
        for param in self.parameters():
            param.grad = None
        return super().forward(x) + self.head.bias


class Greedy(Block):
    """A unit that is no root trains itself first."""

    optimizer: Optimizer

    def forward(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        self.b(F.gelu(self.a(self.norm(x.detach())))).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return super().forward(x)


class Adversaries(nn.Module):
    """Two models with an optimizer each, in one root."""

    optimizer: Optimizer
    other: Optimizer

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.generator, self.critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def generated(self, x: Tensor) -> Tensor:
        return self.generator(self.blocks[0](x))

    def judged(self, x: Tensor) -> Tensor:
        return self.critic(self.blocks[1](x))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.optimizer.zero_grad()
            self.judged(self.generated(x)).square().mean().backward()
            self.optimizer.step()
            self.other.zero_grad()
            (self.judged(self.generated(x).detach()) - 1).square().mean().backward()
            self.other.step()
        self.other.zero_grad()
        self.optimizer.zero_grad()
        return self.judged(self.generated(x))


Make = Callable[[list[nn.Parameter]], Optimizer]


def prepare(model: Any, make: Make) -> None:
    """Give it its optimizers, which hold the parameters that it has now."""
    if isinstance(model, Adversaries):
        first, second = model.blocks
        model.optimizer = make([*model.generator.parameters(), *first.parameters()])
        model.other = make([*model.critic.parameters(), *second.parameters()])
        return
    for module in model.modules():
        if isinstance(module, (Training, Greedy)):
            module.optimizer = make(list(module.parameters()))


def trains(model: Any, x: Tensor, make: Make, with_gradients: bool = True) -> Tensor:
    if "optimizer" not in vars(model):
        prepare(model, make)
    with torch.set_grad_enabled(with_gradients):
        y: Tensor = model(x)
    if with_gradients:
        y.square().mean().backward()
    return y


def check(
    model: Callable[[], nn.Module], optimizer: str = "SGD", compiles: bool = False, **options: Any
) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        if compiles and is_sharded(model):
            for block in model.blocks:
                block.compile(backend="aot_eager")
        return trains(model, x, OPTIMIZERS[optimizer], model_is_trained)

    model_is_trained = model is not InEvaluation
    as_one_process(model, run, **options)


# Another model is trained by a hook of this one


def another_is_trained(in_backward: bool, **options: Any) -> None:
    """Two steps of it and an evaluation, in a hook on what a unit of this model returns."""
    models, others = pair(Net, **options), pair(Net, **options)
    for model, other in zip(models, others, strict=True):
        optimizer = SGD(other.parameters(), 0.05)
        # The gradient of the mean over more rows is smaller.
        scale = 20 if model is models[0] else 10

        def train(x: Tensor, other: Any = other, optimizer: Optimizer = optimizer) -> None:
            with torch.enable_grad():
                for _ in range(2):
                    optimizer.zero_grad()
                    backward(other, x.detach())
                    optimizer.step()
                with torch.no_grad():
                    other(x)

        def hook(
            module: nn.Module, args: Any, out: Tensor, train: Any = train, scale: int = scale
        ) -> None:
            if in_backward:
                out.register_hook(lambda gradient: train(scale * gradient))
            else:
                train(out)

        model.blocks[1].register_forward_hook(hook)
    for step in range(2):
        x = whole_batch(step)
        for model, rows in zip(models, (x, part(x)), strict=True):
            model.zero_grad()
            squares(model, rows).backward()
        for plain, sharded in (models, others):
            check_models(plain, sharded, f"step {step}")
            check_rests(sharded)


KINDS = [
    OwnHead,
    InEvaluation,
    WithoutStep,
    KeptOver,
    ByInput,
    ByInputOfSecondOrder,
    Fails,
    Adversaries,
]


OTHERWISE = {
    "Fails*": "a backward that fails reshards the root, whose forward goes on: an error",
}


def cases() -> Cases:
    found: Cases = {}
    for name in OPTIMIZERS:
        found |= in_settings(f"Manual, {name}", check, model=Manual, optimizer=name)
    found["Manual, compiled"] = Case(lambda: check(Manual, compiles=True))
    for kind in KINDS:
        found |= in_settings(kind.__name__, check, model=kind)
    found["Adversaries, fused"] = Case(lambda: check(Adversaries, "SGD, fused"))
    found |= in_settings("Greedy", check, model=lambda: Net(Greedy))
    for where, in_backward in (("forward", False), ("backward", True)):
        name = f"another model, by a hook in {where}"
        found |= in_settings(name, another_is_trained, in_backward=in_backward)
    return found


CASES = listed(cases(), OTHERWISE)


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", named(CASES))
def test_training_inside_of_a_forward_is_that_of_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
