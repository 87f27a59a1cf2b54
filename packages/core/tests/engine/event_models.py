"""A model whose units mark what they do, and functions that write down a step of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import fully_shard

from .models import make
from .recorders import Timeline, mark

Shard = Callable[..., Any]
Events = list[str]

# Elements of the units: 16 x 16 + 16, 16 x 32 + 32, 32 x 48 + 48. All are multiples of 16, so that
# neither we nor FSDP2 pad them on 2 ranks.
SIZES = {"a": 272, "b": 544, "c": 1584, "root": 48}


class Layer(nn.Module):
    """Marks when its forward and its backward begin."""

    def __init__(self, name: str, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(num_inputs, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        mark(f"forward {self.name}")
        return torch.tanh(mark_backward(self.linear(x), self.name))


def mark_backward(x: Tensor, name: str) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda _: mark(f"backward {name}"))
    return x


class Stack(nn.Module):
    """Three layers, and a parameter of the root that is used after them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Layer("a", 16, 16), Layer("b", 16, 32), Layer("c", 32, 48)
        self.scale = nn.Parameter(torch.ones(48))

    @property
    def units(self) -> dict[str, nn.Module]:
        return {"a": self.a, "b": self.b, "c": self.c, "root": self}

    def forward(self, x: Tensor) -> Tensor:
        mark("forward root")
        return torch.tanh(mark_backward(self.layers(x) * self.scale, "root"))

    def layers(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


class Checkpointed(Stack):
    use_reentrant = False

    def layers(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for layer in (self.b, self.c):
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Reentrant(Checkpointed):
    use_reentrant = True


def sharded(model_class: type[Stack] = Stack, shard: Shard = fully_shard, **options: Any) -> Stack:
    model = make(model_class)
    for module in model.units.values():
        shard(module, **options)
    return model


def step(model: nn.Module) -> None:
    loss = model(torch.ones(2, 16)).sum()
    mark("loss")
    loss.backward()


def events_of(
    model: Stack,
    run: Callable[[Stack], object] = step,
    *,
    sizes: Mapping[str, int] = SIZES,
    units: Mapping[str, nn.Module] | None = None,
    num_shards: int = 2,
) -> Events:
    with Timeline(units or model.units, sizes, num_shards) as timeline:
        run(model)
        timeline.write("end")
    return timeline.events


def events_of_second(model: Stack, run: Callable[[Stack], object] = step) -> Events:
    run(model)
    return events_of(model, run)


def step_with_gradient_of_the_input(model: Stack) -> None:
    x = torch.ones(2, 16, requires_grad=True)
    x.register_hook(lambda _: mark("input"))
    model(x).sum().backward()


def evaluate(model: Stack) -> None:
    with torch.no_grad():
        model(torch.ones(2, 16))
