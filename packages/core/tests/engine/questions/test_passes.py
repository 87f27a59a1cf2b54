"""Any number of forwards and backwards, in any order, also where one of them raises an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from .asking import (
    Answers,
    Block,
    Cases,
    Net,
    Outcomes,
    answer,
    as_one_process,
    backward,
    in_settings,
    named,
    squares,
)

# Forwards and backwards


def two_outputs_of_one_graph(model: Any, x: Tensor) -> None:
    y = model(x)
    y[:, 0].square().mean().backward(retain_graph=True)
    y[:, 1].square().mean().backward()


def two_graphs_the_first_first(model: Any, x: Tensor) -> None:
    first, second = squares(model, x), squares(model, 2 * x)
    first.backward()
    second.backward()


def two_graphs_the_last_first(model: Any, x: Tensor) -> None:
    first, second = squares(model, x), squares(model, 2 * x)
    second.backward()
    first.backward()


def a_graph_that_is_kept(model: Any, x: Tensor) -> None:
    kept = model(3 * x)
    backward(model, x)
    del kept


def a_graph_that_is_dropped(model: Any, x: Tensor) -> None:
    model(3 * x)
    backward(model, x)


def an_evaluation_in_between(model: Any, x: Tensor) -> None:
    loss = squares(model, x)
    with torch.no_grad():
        model(2 * x)
    loss.backward()


def a_backward_by_the_input_first(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    squares(model, x).backward(inputs=[x])
    squares(model, x).backward()
    assert x.grad is not None
    return x.grad * len(x)


def one_unit_alone(model: Any, x: Tensor) -> None:
    squares(model.blocks[1], x).backward()


class Ordered(Net):
    """Which units run, and in which order, is said from outside."""

    order = (0, 1, 2)

    def through(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


def a_unit_left_out(model: Ordered, x: Tensor) -> None:
    model.order = (0, 2)
    backward(model, x)


def a_unit_called_twice(model: Ordered, x: Tensor) -> None:
    model.order = (0, 1, 0)
    backward(model, x)


# Errors


class Stop(Exception):
    pass


def stop(*_: Any) -> None:
    raise Stop


def an_error_in_a_forward(model: Any, x: Tensor) -> None:
    handle = model.blocks[1].b.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        model(x)
    handle.remove()
    backward(model, x)


def fails(model: Any, x: Tensor, number: int) -> Tensor:
    """The loss of a forward whose backward raises an error in a unit."""
    handle = model.blocks[number].norm.register_forward_hook(
        lambda module, args, out: out.register_hook(stop) and None
    )
    loss = squares(model, x)
    handle.remove()
    return loss


def an_error_in_a_backward(model: Any, x: Tensor, number: int = 1) -> None:
    with pytest.raises(Stop):
        fails(model, x, number).backward()
    model.zero_grad()
    backward(model, x)


def an_error_in_the_first_unit(model: Any, x: Tensor) -> None:
    an_error_in_a_backward(model, x, 0)


def an_error_in_the_last_unit(model: Any, x: Tensor) -> None:
    an_error_in_a_backward(model, x, 2)


def an_error_then_an_older_graph(model: Any, x: Tensor) -> None:
    older = squares(model, x)
    with pytest.raises(Stop):
        fails(model, 2 * x, 1).backward()
    model.zero_grad()
    older.backward()


# Nodes of a unit that have nothing to do with its gradients


class Detached(Block):
    """Early operators need the weights for the gradient by the input only."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.b.weight.detach())
        return x + self.b(F.gelu(self.a(F.linear(self.norm(x), self.a.weight.detach()))))


class Reads(Block):
    """A part is recomputed, and a parameter of it is used outside of that part."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: F.gelu(self.a(x)), self.norm(x), use_reentrant=self.reentrant)
        return x + self.b(y) * self.a.bias


class ReadsReentrant(Reads):
    reentrant = True


class Nested(Block):
    """Two parts are recomputed, one in the argument of the other."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.norm, x, use_reentrant=self.reentrant)
        return x + checkpoint(lambda y: self.b(F.gelu(self.a(y))), y, use_reentrant=self.reentrant)


class NestedReentrant(Nested):
    reentrant = True


class Recomputed(Net):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def to_the_end(model: Any, x: Tensor) -> None:
    with set_checkpoint_early_stop(False):
        backward(model, x.clone().requires_grad_())


def by_the_input_too(model: Any, x: Tensor) -> Tensor:
    """The gradient by a row does not depend on how many there are."""
    x = x.clone().requires_grad_()
    squares(model, x).backward()
    assert x.grad is not None
    return x.grad * len(x)


RUNS = [
    two_outputs_of_one_graph,
    two_graphs_the_first_first,
    two_graphs_the_last_first,
    a_graph_that_is_kept,
    a_graph_that_is_dropped,
    an_evaluation_in_between,
    a_backward_by_the_input_first,
    one_unit_alone,
    an_error_in_a_forward,
    an_error_in_a_backward,
    an_error_in_the_first_unit,
    an_error_in_the_last_unit,
    an_error_then_an_older_graph,
]
NESTED = [
    backward,
    two_graphs_the_last_first,
    two_outputs_of_one_graph,
    an_error_in_a_forward,
    an_error_in_a_backward,
]
RECOMPUTED = [Detached, Reads, ReadsReentrant, Nested, NestedReentrant]


def units_in_units(model: Net) -> list[Any]:
    return [*(block.a for block in model.blocks), *model.blocks]


def cases() -> Cases:
    found: Cases = {}
    for run in RUNS:
        found |= in_settings(run.__name__, as_one_process, run=run, steps=3)
    for run in NESTED:
        name = f"units in units: {run.__name__}"
        found |= in_settings(name, as_one_process, run=run, units=units_in_units, steps=3)
    for run in (a_unit_left_out, a_unit_called_twice):
        found |= in_settings(run.__name__, as_one_process, make=Ordered, run=run, steps=3)
    for block in RECOMPUTED:
        make = lambda block=block: Net(block)  # noqa: E731
        found |= in_settings(block.__name__, as_one_process, make=make, run=by_the_input_too)
    found |= in_settings("recomputed to the end", as_one_process, make=Recomputed, run=to_the_end)
    return found


CASES = cases()


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.parametrize("name", named(CASES))
def test_gradients_are_those_of_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
