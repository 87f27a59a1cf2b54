"""What a unit changes in a container that it is given, the caller sees, also under autograd."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp import fully_shard
from vescale_fsdp.engine.containers import Copies, map_tensors
from vescale_fsdp.testing import run_ranks

from .helpers import full_gradients


@dataclasses.dataclass
class State:
    x: Tensor
    maps: list[Tensor] = dataclasses.field(default_factory=list)


def test_changes_are_carried_back() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    given = {"list": [one, two], "dict": {"a": one, "b": two}, "state": State(one, [two])}
    copies = Copies()
    copied = map_tensors(lambda tensor: tensor + 1, given, copies)
    again = map_tensors(lambda tensor: tensor * 2, copied, copies)
    again["list"].insert(0, three)
    again["list"].pop()
    again["dict"]["c"] = again["dict"].pop("a")
    again["dict"]["b"] = three
    again["state"].maps.append(three)
    again["new"] = "text"
    assert [item is three for item in copies.new_items()] == [True, True, True, False]
    copies.carry_back(lambda item: item if isinstance(item, str) else -item)
    values = given["list"]
    assert torch.equal(values[0], three * -1)
    assert values[1] is one
    assert list(given["dict"]) == ["b", "c"]
    assert given["dict"]["c"] is one
    assert given["state"].x is one
    assert given["state"].maps[0] is two
    assert len(given["state"].maps) == 2
    assert given["new"] == "text"


def test_what_is_not_changed_is_not_written() -> None:
    class Locked(OrderedDict[str, Any]):
        def __delitem__(self, key: str) -> None:
            raise AssertionError(key)

    given, copies = Locked(a=torch.ones(1), b=[torch.ones(1)]), Copies()
    before = list(given.items())
    copied = map_tensors(lambda tensor: tensor + 1, given, copies)
    copied["b"].append(3)
    copies.carry_back()
    assert all(a is c and b is d for (a, b), (c, d) in zip(given.items(), before, strict=True))
    assert given["b"][1] == 3


class Changing(nn.Module):
    """Returns nothing; what it computes is in what it was given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, given: Any) -> None:
        if self.kind == "dict":
            given["x"] = torch.tanh(self.layer(given["x"]))
        elif self.kind == "list":
            given.append(torch.tanh(self.layer(given[-1])))
        elif self.kind == "nested":
            given["maps"][0] = torch.tanh(self.layer(given["maps"][0]))
        else:
            given.x = torch.tanh(self.layer(given.x))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.units = nn.ModuleList([Changing(kind) for _ in range(3)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        given: Any = {"dict": {"x": x}, "list": [x], "nested": {"maps": [x]}, "state": State(x)}
        given = given[self.kind]
        for unit in self.units:
            unit(given)
        if self.kind == "list":
            return torch.stack(given).sum(0)
        found: Tensor = (
            given["x"]
            if self.kind == "dict"
            else given["maps"][0]
            if self.kind == "nested"
            else given.x
        )
        return found


def check(kind: str) -> None:
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.float64)):
        torch.manual_seed(0)
        model = Model(kind)
        torch.manual_seed(0)
        plain = Model(kind).to(policy.param_dtype or torch.float32)
        for unit in model.units:
            fully_shard(unit, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        x = torch.ones(2, 4)
        for _ in range(2):
            with torch.no_grad():
                expected = plain(x.to(plain.head.weight.dtype))
                torch.testing.assert_close(model(x).to(expected.dtype), expected)
            for each in (model, plain):
                each.zero_grad()
                each(x.to(expected.dtype)).square().sum().backward()
            for name, gradient in full_gradients(model).items():
                wanted: Any = plain.get_parameter(name).grad
                torch.testing.assert_close(gradient, wanted.to(gradient.dtype), msg=name)


@pytest.mark.parametrize("kind", ["dict", "list", "nested", "state"])
def test_units_that_return_nothing_train_as_one_process(kind: str) -> None:
    run_ranks(check, 2, kind)
