"""A backward raises an error that somebody keeps, and the next backward has no forward before it.

The gradients are those of the second backward alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .asking import (
    Answers,
    Case,
    Cases,
    Net,
    Outcomes,
    answer,
    as_one_process,
    check_models,
    check_rests,
    in_settings,
    listed,
    named,
    pair,
    part,
    squares,
    synchronize,
)
from .asking import batch as whole_batch


class Stop(Exception):
    pass


def stop(*_: Any) -> None:
    raise Stop


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise Stop


def on_outputs(hook: Callable[[Tensor], Any], number: int = 1) -> Callable[[Any], Any]:
    """Puts ``hook`` on what the norm of a unit returns."""
    return lambda model: model.blocks[number].norm.register_forward_hook(
        lambda module, args, out: out.register_hook(hook) and None
    )


# Where it is raised: each takes a model and returns what can be removed.
PLACES: dict[str, Callable[[Any], Any]] = {
    "a hook in the first unit": on_outputs(stop, 0),
    "a hook in the second unit": on_outputs(stop, 1),
    "a hook in the last unit": on_outputs(stop, 2),
    "a node": lambda model: model.blocks[1].b.register_forward_hook(
        lambda module, args, out: Breaks.apply(out)
    ),
    "a backward hook": lambda model: model.blocks[1].register_full_backward_hook(stop),
    "a backward pre-hook": lambda model: model.blocks[1].register_full_backward_pre_hook(stop),
    "a hook of a parameter": lambda model: model.blocks[1].a.weight.register_hook(stop),
    "the first hook after accumulation": lambda model: (
        model.head.weight.register_post_accumulate_grad_hook(stop)
    ),
    "the last hook after accumulation": lambda model: model.blocks[
        0
    ].a.weight.register_post_accumulate_grad_hook(stop),
}
OF_MODULES = ("a backward hook", "a backward pre-hook")  # which meet any forward


def fails_before(
    model: Any,
    x: Tensor,
    place: str = "a hook in the second unit",
    is_first: bool = False,
    keeps: bool = True,
    times: int = 1,
    waits: bool = False,
    evaluates: bool = False,
) -> None:
    """Backwards that raise, then one that does not, whose forward was before theirs or after."""
    kept: list[Exception] = []
    if waits:
        synchronize(model, False)
    loss = squares(model, x) if is_first else None
    handle = PLACES[place](model)
    losses = [squares(model, 3 * x) for _ in range(times)]
    if place.startswith("a hook in") or place == "a node":  # that of the other forward has none
        handle.remove()
    if loss is None:
        loss = squares(model, x)
    for each in losses:
        with pytest.raises(Stop) as caught:
            each.backward()
        if keeps:
            kept.append(caught.value)
        del caught
    handle.remove()
    model.zero_grad()
    if evaluates:
        with torch.no_grad():
            model(x)
    if waits:
        synchronize(model, True)
    loss.backward()
    del kept


def inside_of_another() -> None:
    """A hook in a backward runs another model's backward, which raises and is caught there."""
    models, others, kept = pair(Net), pair(Net), []
    for step in range(2):
        x = whole_batch(step)
        for model, other, rows in zip(models, others, (x, part(x)), strict=True):
            model.zero_grad()

            def train(gradient: Tensor, other: Any = other, rows: Tensor = rows) -> None:
                with torch.enable_grad():
                    handle = on_outputs(stop)(other)
                    loss = squares(other, rows)
                    handle.remove()
                    with pytest.raises(Stop) as caught:
                        loss.backward()
                    kept.append(caught.value)

            handle = on_outputs(train)(model)
            loss = squares(model, rows)
            handle.remove()
            loss.backward()
        check_models(*models, f"step {step}")
    for other, rows in zip(others, (x, part(x)), strict=True):
        other.zero_grad()
        squares(other, rows).backward()
    check_models(*others)
    check_rests(others[1])


def gradient_of_the_input(model: Any, x: Tensor) -> None:
    """``autograd.grad`` raises, and then the same graph has its backward."""
    fails, kept = [True], []
    handle = on_outputs(lambda gradient: stop() if fails else None)(model)
    x = x.clone().requires_grad_()
    loss = squares(model, x)
    handle.remove()
    with pytest.raises(Stop) as caught:
        torch.autograd.grad(loss, x, retain_graph=True)
    kept.append(caught.value)
    fails.clear()
    loss.backward()


def cases() -> Cases:
    found: Cases = {}
    for place in PLACES:

        def run(model: Any, x: Tensor, place: str = place, **how: Any) -> None:
            fails_before(model, x, place, **how)

        if place not in OF_MODULES:
            found |= in_settings(place, as_one_process, run=run)
        for suffix, how in (("", {}), (", not kept", {"keeps": False})):
            found[f"{place}, a forward before it{suffix}"] = Case(
                lambda run=run, how=how: as_one_process(
                    run=lambda model, x: run(model, x, is_first=True, **how)
                )
            )
    for name, how in {
        "two that raise": {"times": 2},
        "gradients that wait": {"waits": True},
        "an evaluation in between": {"evaluates": True},
    }.items():
        found[name] = Case(
            lambda how=how: as_one_process(run=lambda model, x: fails_before(model, x, **how))
        )
    found["inside of another backward"] = Case(inside_of_another)
    found |= in_settings("autograd.grad", as_one_process, run=gradient_of_the_input)
    return found


OTHERWISE = {
    "inside of another backward": "the second forward there is not gathered: an error",
    # Between a forward and its backward `model.head.weight` is the view of that forward.
    "the first hook after accumulation, a forward before it*": "torch: such hooks are for leaves",
}
CASES = listed(cases(), OTHERWISE)


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.parametrize("name", named(CASES))
def test_gradients_are_those_of_the_backward_that_ends(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
