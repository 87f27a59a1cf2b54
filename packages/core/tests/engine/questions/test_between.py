"""Between the forward and the backward of a model: parameters read, frozen, written, loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

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
    batch,
    check_models,
    check_rests,
    in_settings,
    named,
    pair,
    part,
    squares,
)


def the_loss_reads_the_head(model: Any, x: Tensor) -> None:
    loss = squares(model, x)
    (loss + model.head.weight.square().sum()).backward()


def the_head_is_frozen(model: Any, x: Tensor) -> None:
    """Through the module, for the forwards that follow."""
    loss = squares(model, x)
    model.head.requires_grad_(False)
    loss.backward()
    model.zero_grad()
    backward(model, x)
    assert model.head.weight.grad is None
    model.head.requires_grad_(True)


def a_state_is_loaded(model: Any, x: Tensor) -> None:
    loss = squares(model, x)
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
    backward(model, x)
    del loss


def parameters_are_written(model: Any, x: Tensor) -> None:
    loss = squares(model, x)
    with torch.no_grad():
        for param in model.head.parameters():
            param.mul_(0.5)
    del loss
    backward(model, x)


def the_head_is_written_by_attribute(model: Any, x: Tensor) -> None:
    loss = squares(model, x)
    with torch.no_grad():
        model.head.bias.mul_(0.5)  # which no backward reads
    loss.backward()
    model.zero_grad()
    backward(model, x)


def what_the_backward_needs_is_written(model: Any, x: Tensor) -> None:
    loss = squares(model, x)
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    loss.backward()


def an_optimizer_is_made(model: Any, x: Tensor) -> None:
    """Of all parameters, and so of those that it will have to step."""
    loss = squares(model, x)
    optimizer = SGD(model.parameters(), 0.1)
    loss.backward()
    optimizer.step()


def an_optimizer_is_made_of_an_attribute() -> None:
    """It steps the parameter, or is refused: it never keeps quiet and does nothing."""
    plain, model = pair()
    for each, x in ((plain, batch(0)), (model, part(batch(0)))):
        loss = squares(each, x)
        try:
            optimizer = SGD([each.head.weight], 0.1)
        except ValueError:
            assert each is model
            return
        loss.backward()
        optimizer.step()
    check_models(plain, model)


class Keeps(Block):
    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["kept"] = self.a.weight
        return super().forward(x)


def a_weight_leaves_its_unit() -> None:
    """What a forward has kept of its weight is no number that looks like one after resharding."""
    _, model = pair(lambda: Net(Keeps))
    loss = squares(model, part(batch(0)))
    kept = model.blocks[0].kept
    expected = model.blocks[0].a.weight.full_tensor()
    try:
        found = kept + 0
    except RuntimeError:
        found = None  # it has no memory
    assert found is None or found.isnan().all() or torch.equal(found, expected)
    loss.backward()
    check_rests(model)


def cases() -> Cases:
    found: Cases = {}
    for run in (
        the_head_is_frozen,
        a_state_is_loaded,
        parameters_are_written,
        an_optimizer_is_made,
    ):
        found |= in_settings(run.__name__, as_one_process, run=run)
    # A root that is resharded has no whole head then.
    for run in (the_loss_reads_the_head, the_head_is_written_by_attribute):
        found[run.__name__] = Case(lambda run=run: as_one_process(run=run))
    found["what_the_backward_needs_is_written"] = Case(
        lambda: as_one_process(
            run=what_the_backward_needs_is_written, raises="modified by an inplace operation"
        )
    )
    for ask in (an_optimizer_is_made_of_an_attribute, a_weight_leaves_its_unit):
        found[ask.__name__] = Case(ask)
    return found


CASES = cases()


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.parametrize("name", named(CASES))
def test_it_is_as_in_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
