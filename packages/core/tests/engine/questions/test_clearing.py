"""Gradients that wait for the last micro-batch, and ``zero_grad`` of modules and optimizers.

In one process nothing waits, so what is cleared is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .asking import (
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
    listed,
    named,
    squares,
    synchronize,
)

Clear = Callable[[Any], object]
CLEAR: dict[str, Clear] = {
    "the model": lambda model: model.zero_grad(),
    "a unit": lambda model: model.blocks[1].zero_grad(),
    "a part of a unit": lambda model: model.blocks[1].a.zero_grad(),
    "a list of units": lambda model: model.blocks.zero_grad(),
    "a part of the root": lambda model: model.head.zero_grad(),
    "a unit, to zeros": lambda model: model.blocks[1].zero_grad(set_to_none=False),
    "a parent": lambda model: nn.Sequential(model).zero_grad(),
    "an optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "one parameter by hand": lambda model: setattr(model.head.weight, "grad", None),
}
OTHERWISE = {
    "an optimizer*": "what waits is not in .grad, and is kept, as by FSDP2 (see test_outside)",
    "a part*": "only modules that fully_shard was called on drop what waits",
    "a list of units*": "only modules that fully_shard was called on drop what waits",
    "a parent*": "only modules that fully_shard was called on drop what waits",
    "a tied weight": "only modules that fully_shard was called on drop what waits",
    "one parameter by hand*": "what waits is not in .grad, and is kept, as by FSDP2",
}


class Tied(Net):
    """A weight of the first unit is the last one's, too, and so is the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].b.weight = self.blocks[0].a.weight


class ClearsInForward(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad()
        return super().forward(x)


def three_backwards(
    model: Any, x: Tensor, clear: Clear, is_synced_first: bool = False, uses_one: bool = False
) -> None:
    """The last one reduces. What the first has left is cleared."""
    if is_synced_first:
        backward(model, 3 * x)
    synchronize(model, False)
    part = model.blocks[1] if uses_one else model
    backward(part, x)
    clear(model)
    backward(part, 2 * x)
    synchronize(model, True)
    backward(model, 0.5 * x)


def in_forwards(model: Any, x: Tensor) -> None:
    synchronize(model, False)
    backward(model, x)
    synchronize(model, True)
    backward(model, 2 * x)


def after_a_forward(model: Any, x: Tensor, clear: Clear) -> None:
    """Between the forward and the backward of the last micro-batch."""
    synchronize(model, False)
    backward(model, x)
    synchronize(model, True)
    loss = squares(model, x)
    clear(model)
    loss.backward()


def cases() -> Cases:
    found: Cases = {}
    for name, clear in CLEAR.items():
        run = lambda model, x, clear=clear: three_backwards(model, x, clear)  # noqa: E731
        found |= in_settings(name, as_one_process, run=run)
        for suffix, check, more in (
            (", after one that is reduced", three_backwards, {"is_synced_first": True}),
            (", after a forward", after_a_forward, {}),
        ):
            found[name + suffix] = Case(
                lambda clear=clear, check=check, more=more: as_one_process(
                    run=lambda model, x: check(model, x, clear, **more)
                )
            )
    for name in ("a unit", "a part of a unit"):
        found[f"{name}, which alone is used"] = Case(
            lambda clear=CLEAR[name]: as_one_process(
                run=lambda model, x: three_backwards(model, x, clear, uses_one=True)
            )
        )
    found["a tied weight"] = Case(
        lambda: as_one_process(
            Tied, lambda model, x: three_backwards(model, x, lambda m: m.blocks[0].a.zero_grad())
        )
    )
    found |= in_settings(
        "in a forward", as_one_process, make=lambda: Net(ClearsInForward), run=in_forwards
    )
    return found


CASES = listed(cases(), OTHERWISE)


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.parametrize("name", named(CASES))
def test_what_is_cleared_is_gone(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
