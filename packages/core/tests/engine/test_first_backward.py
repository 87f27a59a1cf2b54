"""Parameters from before ``fully_shard``, and those around units, in the first backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint as checkpoint_of

from vescale_fsdp import checkpoint, clip_grad_norm_, fully_shard, replaced_parameters
from vescale_fsdp.engine import check_reduced
from vescale_fsdp.testing import run_ranks


class Listed(nn.Module):
    """It computes with what a list has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.all = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.all[0]


def step(model: nn.Module) -> list[str]:
    """The warnings of a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    return [str(each.message) for each in caught]


def compute_with_what_was_replaced() -> None:
    model = nn.Sequential(Listed(), nn.Linear(4, 4))
    fully_shard(model)
    for _ in range(2):  # each time
        with pytest.raises(
            RuntimeError, match=r"forward has computed .*'0.weight'\. A list, a closure"
        ):
            step(model)
    model[0].all = [model[0].weight]  # as the message says: looked up when the module is sharded
    for has_former, adds in ((True, True), (True, False), (False, False)):
        trial = nn.Sequential(Listed(), nn.Linear(4, 4))
        former = trial[0].all[0]
        former.grad = torch.ones(4, 4) if has_former else None
        before = torch.optim.SGD([former], 0.1)
        fully_shard(trial)
        if not adds:
            before.zero_grad()  # the gradient of the step is a new one
        with pytest.raises(RuntimeError, match=r"forward has computed .*'0.weight'"):
            step(trial)
    frozen = Listed()
    frozen.weight.requires_grad_(False)
    step(fully_shard(nn.Sequential(frozen, nn.Linear(4, 4))))  # a constant


def test_a_gradient_of_a_replaced_parameter_is_an_error() -> None:
    run_ranks(compute_with_what_was_replaced, 2)


def hold_what_was_replaced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = torch.optim.SGD(model.parameters(), 0.1)
    params = list(model.parameters())
    params[0].grad = torch.ones(4, 4)  # of a trial
    fully_shard(model[0])
    fully_shard(model)
    before.zero_grad(set_to_none=False)  # which writes to the gradient
    assert step(model) == [
        "4 parameters that fully_shard has replaced are still held: '1.weight', '1.bias', "
        "'0.weight' and 1 more. An optimizer, a list or a closure (also that of a hook) that was "
        "made before fully_shard holds them. They are not trained, and keep 160 bytes of memory on "
        "this rank. Make it after fully_shard, of model.parameters(), or delete it"
    ]  # 2 * (4 * 4 + 4) * 4
    assert step(model) == []  # said once
    assert step(copy.deepcopy(model)) == []  # nobody holds its former ones
    del before
    assert replaced_parameters(params) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert replaced_parameters(model.parameters()) == []
    with pytest.raises(ValueError, match=r"has replaced '0.weight', '0.bias', .* and 1 more of"):
        clip_grad_norm_(params, 1.0)
    assert clip_grad_norm_(model.parameters(), 1.0) > 0


def test_several_replaced_parameters_are_warned_of() -> None:
    run_ranks(hold_what_was_replaced, 2)


class Recurrent(nn.Module):
    """Modules that hold their parameters in other ways too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.unused = nn.LSTM(4, 4), nn.LSTM(4, 4)
        self.normed = weight_norm(nn.Linear(4, 4))
        self.head, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.head(self.normed(self.lstm(x)[0])))


def hold_rightly() -> None:
    model = Recurrent()
    for param in model.parameters():  # the variable stays
        param.data.mul_(2)
    teacher = copy.deepcopy(model)
    expected = teacher(torch.ones(2, 4))
    backbone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    frozen = list(backbone.requires_grad_(False).parameters())
    model.backbone = backbone
    fully_shard(model)
    torch.testing.assert_close(model(torch.ones(2, 4)), expected)
    assert step(model) == []
    assert len(frozen) == 4
    unused = zip(model.unused._flat_weights, model.unused.parameters(), strict=True)
    assert all(one is other for one, other in unused)  # by its own __setattr__, as in FSDP2


def test_other_holders_are_not_warned_of() -> None:
    run_ranks(hold_rightly, 2)


class Model(nn.Module):
    """Blocks, and what is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.recomputes = False
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            run = partial(checkpoint_of, block, use_reentrant=True) if self.recomputes else block
            x = x + run(x)
        return self.head(x)


ROOTS = "one backward has reached {} outermost units of the class Linear"
NAMED = r"'embed.weight', 'embed.bias', 'head.weight' and 1 more of Model are trainable and belong"


def blocks_alone(**options: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, **options)
    return model


def nothing_above_units(path: Path) -> None:
    model = blocks_alone()
    (text,) = step(model)
    assert text.startswith(ROOTS.format(3)), text
    assert step(model) == []  # said once
    with pytest.raises(ValueError, match=f"clip_grad_norm_: {NAMED}"):
        clip_grad_norm_(model, 1.0)
    with pytest.raises(ValueError, match=f"checkpoint.save: {NAMED}"):
        checkpoint.save(path / "refused", model)
    assert not (path / "refused").exists()

    recomputing = blocks_alone()  # each has a backward of its own, within that of the loss
    recomputing.recomputes = True
    (text,) = step(recomputing)
    assert text.startswith(ROOTS.format(3)), text
    assert step(recomputing) == []

    as_error = blocks_alone()  # which ends the backward as else
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "one backward has reached")
        with pytest.raises(UserWarning, match="one backward has reached"):
            as_error(torch.ones(2, 4)).sum().backward()
    assert all(block.weight.grad is not None for block in as_error.blocks)
    assert step(as_error) == []

    by_hand = blocks_alone()  # answers: arguments,
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "one backward has reached")  # as the message says
        by_hand(torch.ones(2, 4)).sum().backward()
    assert clip_grad_norm_(by_hand, 1.0, reduced_by_hand=True) > 0
    checkpoint.save(path / "by_hand", by_hand, reduced_by_hand=True)

    ignored = Model()  # what a call was told to leave alone, also if it lies outside,
    around = {*ignored.embed.parameters(), *ignored.head.parameters()}
    for block in ignored.blocks:
        fully_shard(block, ignored_params=around)
    assert step(copy.deepcopy(ignored)) == []
    assert step(ignored) == []
    assert clip_grad_norm_(ignored, 1.0) > 0

    inner = blocks_alone()  # DDP around,
    sharded = [name for name, _ in inner.named_parameters() if name.startswith("blocks")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, sharded)
    around_all = DistributedDataParallel(inner)
    assert step(around_all) == []
    for each in (around_all, inner):
        assert clip_grad_norm_(each, 1.0) > 0

    whole = fully_shard(blocks_alone())  # a unit around all,
    assert step(whole) == []
    checkpoint.save(path / "whole", whole)
    whole.late = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"'late.weight', 'late.bias' of Model are trainable"):
        clip_grad_norm_(whole, 1.0)

    frozen = blocks_alone()  # and nothing that trains
    for part in (frozen.embed, frozen.head):
        part.requires_grad_(False)
    step(frozen)  # it is warned of: units do not know what is around them
    assert clip_grad_norm_(frozen, 1.0) > 0


def test_parameters_around_units_are_refused_and_warned_of(tmp_path: Path) -> None:
    run_ranks(nothing_above_units, 2, tmp_path)


class Pair(nn.Module):
    """Two models of one class in one backward."""

    def __init__(
        self,
        second: Callable[[nn.Module, nn.Module, Tensor], Tensor],
        make: Callable[[], nn.Module] = lambda: nn.Linear(4, 4),
    ) -> None:
        super().__init__()
        self.one, self.other, self.second = make(), make(), second
        for model in (self.one, self.other):
            for block in model.children():
                fully_shard(block)
            fully_shard(model)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.second(self.one, self.other, x)


def several_models() -> None:
    towers = Pair(lambda one, other, x: other(x))  # both begin with data, as experts might
    (text,) = step(towers)
    assert "one backward has reached 2 outermost units of the class Linear: model " in text
    critics = Pair(lambda one, other, x: other(x))
    for model in critics.children():  # as adapters do, which see all of a model
        check_reduced(model, "prepare")
    assert step(critics) == []
    block = copy.deepcopy(critics.one)  # may be anywhere
    critics.one, critics.other = block, copy.deepcopy(block)
    assert len(step(critics)) == 1
    teacher = Pair(lambda one, other, x: other(one(x)))
    teacher.other.requires_grad_(False)
    assert step(teacher) == []
    for make in (lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4))):
        chain = Pair(lambda one, other, x: other(one(x)), make)
        (text,) = step(chain)
        assert "one backward has reached 2 outermost units of the class" in text


def test_models_of_one_class_are_warned_of_once() -> None:
    run_ranks(several_models, 2)
