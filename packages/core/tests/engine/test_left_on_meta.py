"""Parameters left on meta: the error of FSDP2, word for word, of the same model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .libraries import Library, Observe, Outcomes, observe_all, ones


class Block(nn.Module):
    """Parameters of its own around those of its children, which FSDP2 lists first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) + self.shift


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x * self.gain)))


def on_meta(library: Library) -> Any:
    with torch.device("meta"):
        model = Model()
        return library.shard(model, model.first, model.second)


def all_of_it(library: Library) -> None:
    on_meta(library)(ones())


def all_but_the_root(library: Library) -> None:
    model = on_meta(library)
    model.head.to_empty(device="cpu")
    model.gain = nn.Parameter(torch.empty_like(model.gain, device="cpu"))
    model(ones())


def the_second_block(library: Library) -> None:
    model = on_meta(library)
    model.head.to_empty(device="cpu")
    model.gain = nn.Parameter(torch.empty_like(model.gain, device="cpu"))
    model.first.to_empty(device="cpu")
    model(ones())


def a_part_of_a_block(library: Library) -> None:
    model = on_meta(library)
    model.head.to_empty(device="cpu")
    model.gain = nn.Parameter(torch.empty_like(model.gain, device="cpu"))
    model.first.inner[2].to_empty(device="cpu")
    model(ones())


def a_part_of_the_root(library: Library) -> None:
    model = on_meta(library)
    model.head.to_empty(device="cpu")
    model(ones())


def frozen_and_trainable_ones(library: Library) -> None:
    with torch.device("meta"):
        model = Block()
    model.inner[0].requires_grad_(False)
    library.fully_shard(model)(ones())


def without_units_inside(library: Library) -> None:
    with torch.device("meta"):
        model = Model()
    library.fully_shard(model)(ones())


MISTAKES: list[Observe] = [
    all_of_it,
    all_but_the_root,
    the_second_block,
    a_part_of_a_block,
    a_part_of_the_root,
    frozen_and_trainable_ones,
    without_units_inside,
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return observe_all(MISTAKES, 2)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_what_is_left_is_listed_as_by_fsdp2(outcomes: Outcomes, mistake: Observe) -> None:
    ours, fsdp2 = (outcomes[library, mistake.__name__] for library in ("ours", "fsdp2"))
    assert fsdp2[0][0] == "RuntimeError", fsdp2
    assert ours == fsdp2
