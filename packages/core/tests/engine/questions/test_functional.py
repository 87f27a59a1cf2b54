"""`torch.func` and other values in place of parameters, at any time.

Whole models with other values are asked of in `test_functional_call`, forward-mode derivatives and
the refusal of `torch.func.grad` in `test_composition`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jacfwd, jacrev, jvp, vmap
from torch.nn.utils import stateless

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
    in_settings,
    is_sharded,
    listed,
    made,
    named,
    pair,
    part,
    squares,
    synchronize,
)
from .asking import batch as whole_batch

Values = dict[str, Tensor]


def values(*parts: str) -> Values:
    """Other, whole parameters of the model, or of the parts of this name."""
    return {
        name: (0.5 * param.detach()).requires_grad_()
        for name, param in made(Net).named_parameters()
        if not parts or any(each in name for each in parts)
    }


def gradients_by_values(
    model: Any, x: Tensor, call: Callable[..., Tensor], parts: tuple[str, ...] = ()
) -> list[Tensor]:
    """After a step, and before one: each rank's are those by its own rows."""
    backward(model, x)
    model.zero_grad()
    given = values(*parts)
    y = call(model, given, (x,))
    of_values = torch.autograd.grad(y.square().sum(), list(given.values()))
    backward(model, x)
    return [y, *(averaged(each, model) for each in of_values)]


def averaged(gradient: Tensor, model: Any) -> Tensor:
    """The sum over ranks of what each has computed alone."""
    if is_sharded(model):
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient)
    return gradient


def a_part_in_between(model: Any, x: Tensor) -> list[Tensor]:
    """Between forward and backward: a part of the root that is no unit, and a unit."""
    loss = squares(model, x)
    weight = torch.full((CLASSES, WIDTH), 0.25, dtype=x.dtype)
    square = torch.full((WIDTH, WIDTH), 0.25, dtype=x.dtype)
    found = [
        functional_call(model.head, {"weight": weight}, (x,)),
        functional_call(model.blocks[0], {"a.weight": square}, (x,)),
    ]
    loss.backward()
    return [each.detach() for each in found]


class OfItsParts(Block):
    """A forward that calls its own parts with values that are made of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional_call(self.a, {"weight": 2 * self.a.weight, "bias": self.a.bias}, (x,))
        return x + y + functional_call(self.b, {"weight": 2 * self.b.weight}, (x,))


class TwoOutputs(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.through(x)
        return {"y": self.head(hidden), "hidden": hidden}


def after_gradients_that_wait(model: Any, x: Tensor) -> None:
    """These values lead to the parameters, past the engine's nodes."""
    synchronize(model, False)
    model(x)["y"].square().mean().backward()
    synchronize(model, True)
    halves = {name: 0.5 * param for name, param in model.named_parameters()}
    functional_call(model, halves, (x,))["y"].square().mean().backward()


def by_function(model: Any, x: Tensor) -> list[Tensor]:
    """`torch.func.grad` by values, not through the model's own parameters."""

    def loss(given: Values) -> Tensor:
        return functional_call(model, given, (x,)).square().sum()

    found = torch.func.grad(loss)({name: value.detach() for name, value in values().items()})
    return [averaged(each, model) for each in found.values()]


def mapped(model: Any, x: Tensor) -> None:
    vmap(model)(x).square().mean().backward()


def mapped_without_gradients(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return vmap(model)(x)


def along_a_direction(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return jvp(model, (x,), (x.cos(),))  # type: ignore[return-value]


def jacobian_by_columns(model: Any, x: Tensor) -> Tensor:
    return vmap(jacfwd(model))(x)


@contextmanager
def refusing(*words: str) -> Iterator[None]:
    with pytest.raises((NotImplementedError, RuntimeError)) as caught:
        yield
    for each in words:
        assert each in str(caught.value), caught.value


def jacobian_by_rows_is_refused() -> None:
    plain, model = pair()
    x = part(whole_batch(0))
    assert jacrev(plain)(x[0]).shape == (CLASSES, WIDTH)
    with refusing("torch.autograd.grad"):
        jacrev(model)(x[0])


def gradient_of_the_input_is_refused() -> None:
    _, model = pair()
    with refusing("torch.func.grad", "torch.autograd.grad"):
        torch.func.grad(lambda x: squares(model, x))(part(whole_batch(0)))


def cases() -> Cases:
    found: Cases = {}
    for name, parts in {"all": (), "the root's": ("head",), "of units": ("a.",)}.items():
        run = lambda model, x, parts=parts: gradients_by_values(  # noqa: E731
            model, x, functional_call, parts
        )
        found |= in_settings(f"functional_call, {name}", as_one_process, run=run)
    run = lambda model, x: gradients_by_values(model, x, stateless.functional_call)  # noqa: E731
    found |= in_settings("stateless.functional_call", as_one_process, run=run)
    found["a part in between"] = Case(lambda: as_one_process(run=a_part_in_between))
    found |= in_settings(
        "after gradients that wait", as_one_process, make=TwoOutputs, run=after_gradients_that_wait
    )
    found |= in_settings("of its parts", as_one_process, make=lambda: Net(OfItsParts))
    found |= in_settings("vmap", as_one_process, run=mapped)
    for name, run in {
        "grad by values": by_function,
        "vmap without gradients": mapped_without_gradients,
        "jvp": along_a_direction,
        "jacfwd": jacobian_by_columns,
    }.items():
        found |= in_settings(name, as_one_process, run=run, rests=False)
    found["jacrev"] = Case(jacobian_by_rows_is_refused)
    found["grad by the input"] = Case(gradient_of_the_input_is_refused)
    return found


OTHERWISE = {"grad by values*": "refused by name, as where inputs want a gradient of torch.func"}
CASES = listed(cases(), OTHERWISE)


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.stateless.functional_call` is deprecated")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", named(CASES))
def test_functions_of_models_are_those_of_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
