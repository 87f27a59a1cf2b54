"""Units that return several tensors, of which one may be computed from another.

The caller's hooks, ``retain_grad`` and ``autograd.grad`` on one see what comes back through the
others: hidden states of transformers beside the loss, features that several tasks share.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..helpers import averaged_gradients, full_gradients, shard_units
from .asking import Answers, Case, Cases, Outcomes, answer, named, sampled

WIDTH = 6


class Trunk(nn.Module):
    """Returns its result, and what that is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        feature = torch.tanh(self.inner(x))
        return {"logits": self.head(feature), "feature": feature}


class TwoUnits(nn.Module):
    """Returns the hidden states of its units, as ``output_hidden_states=True`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.units[0](x)
        return {"logits": self.units[1](hidden).sin() * self.scale, "feature": hidden}


class Wrapper(nn.Module):
    """Returns what its unit returns."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Trunk()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.unit(x * self.scale)  # type: ignore[no-any-return]


class Views(Trunk):
    """Returns views of one tensor."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first, second = super().forward(x)["logits"].view(-1).split(WIDTH)[:2]
        rows = self.inner(x)
        return {"logits": first * second, "feature": rows[:1]}


class InAndOut(Trunk):
    """Returns its input, too."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {**super().forward(x), "input": x}


class Repeated(Trunk):
    """A checkpoint gives what the other output is computed from: a view made without gradients."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        def repeated(y: Tensor) -> Tensor:
            return torch.tanh(y).view(-1).view(y.shape)

        feature = checkpoint(repeated, self.inner(x), use_reentrant=True)
        return {"logits": self.head(feature), "feature": feature}


class Remembering(nn.Module):
    """Returns its second input as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(self.inner(x) + memory), memory


class Memories(nn.Module):
    """Each unit uses the same memory and hands it on: hooks on it see what comes from all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList([Remembering() for _ in range(2)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        memory = self.first(x)
        for unit in self.units:
            x, memory = unit(x, memory)
        return {"logits": x, "feature": memory}


class Perturbed(Trunk):
    """Returns a leaf that it has made, as forces and adversarial perturbations need."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        delta = torch.zeros_like(x).requires_grad_()
        return {"logits": super().forward(x + delta)["logits"], "feature": delta}


class Table(Trunk):
    """Returns a view of a parameter."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)["logits"], "feature": self.head.weight.t()[:2]}


def my_inputs() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


MODELS = [Trunk, TwoUnits, Wrapper, Views, InAndOut, Repeated, Memories, Perturbed, Table]
Seen = list[Tensor]


def hooked(out: dict[str, Tensor]) -> Seen:
    """The gradient that reaches the trunk is scaled, as by a gradient reversal."""
    seen: Seen = []

    def scale(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient * -0.25

    out["feature"].register_hook(scale)
    (out["logits"].sum() + out["feature"].square().sum()).backward()
    return seen


def retained(out: dict[str, Tensor]) -> Seen:
    out["feature"].retain_grad()
    out["logits"].square().sum().backward()
    gradient = out["feature"].grad
    assert gradient is not None
    return [gradient]


def shared(out: dict[str, Tensor]) -> Seen:
    """Gradients of two tasks with respect to what they share, as MGDA and GradNorm take them."""
    losses = [out["logits"].sum(), out["feature"].square().mean()]
    found = [torch.autograd.grad(loss, out["feature"], retain_graph=True)[0] for loss in losses]
    out["feature"].backward(0.3 * found[0] + 0.7 * found[1])
    return found


def only_the_feature(out: dict[str, Tensor]) -> Seen:
    seen: Seen = []
    out["logits"].register_hook(seen.append)  # must not be called with None
    out["feature"].sum().backward()
    return seen


def only_the_logits(out: dict[str, Tensor]) -> Seen:
    out["logits"].sum().backward()
    return []


def in_place(out: dict[str, Tensor]) -> Seen:
    with torch.no_grad():
        before = out["logits"].clone()
    out["logits"].mul_(2).add_(1)
    out["logits"].sum().backward()
    return [before]


def twice(out: dict[str, Tensor]) -> Seen:
    out["feature"].sum().backward(retain_graph=True)
    out["logits"].sum().backward()
    return []


USES = [hooked, retained, shared, only_the_feature, only_the_logits, in_place, twice]


def check(make: type[nn.Module], use: Callable[[dict[str, Tensor]], Seen], sharding: str) -> None:
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    ours = make()
    kinds = {TwoUnits: nn.Linear, Memories: Remembering}
    units = [each for each in ours.modules() if type(each) is kinds.get(make, Trunk)]
    shard_units(ours, [each for each in units if each is not ours], sharding=sharding)
    for _ in range(3):
        plain.zero_grad()
        ours.zero_grad()
        found, expected = (use(model(my_inputs())) for model in (ours, plain))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        gradients = full_gradients(ours)
        for name, gradient in averaged_gradients(plain).items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


def cases() -> Cases:
    used = {
        f"{make.__name__}, {use.__name__}": Case(
            lambda make=make, use=use: check(make, use, "zero3"),
        )
        for make, use in product(MODELS, USES)
        # Of Views and Table no output is computed from another.
        if make not in (Views, Table) or use not in (shared, retained)
    }
    found = sampled(26, used)
    grid = product((TwoUnits, Memories, Perturbed), (hooked, shared), ("zero2", "zero1", "ddp"))
    for make, use, sharding in grid:
        found[f"{make.__name__}, {use.__name__}, {sharding}"] = Case(
            lambda make=make, use=use, sharding=sharding: check(make, use, sharding)
        )
    return found


CASES = cases()


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.parametrize("name", named(CASES))
def test_they_are_used_as_those_of_a_plain_model(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
