"""Parameters of a module that its parent reads without calling it."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vescale_fsdp import callable_units
from vescale_fsdp.testing import run_ranks

from .helpers import assert_gradients_like_plain, shard_units


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Block(nn.Module):
    """Its norm has a part that the model calls, as in the DiT of diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.norm.time = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x) + self.norm.time(x))


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.blocks[0].norm.time(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.LayerNorm(8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.scale.weight)


def names_in(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """The names of what is wrapped if a policy chooses all modules of a class."""
    chosen = [each for each in reversed(list(model.modules())) if isinstance(each, kind)]
    units = callable_units(model, chosen)
    return [next(name for name, each in model.named_modules() if each is unit) for unit in units]


def test_a_policy_wraps_parents_in_place_of_what_they_read() -> None:
    assert names_in(Attention(), nn.Linear) == ["head", "attention"]
    assert names_in(nn.MultiheadAttention(8, 2), nn.Linear) == []  # the parent is the model
    layers = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16))
    assert names_in(layers, nn.Linear) == names_in(layers, nn.MultiheadAttention) == ["0"]
    assert names_in(Diffusion(), Block) == ["blocks.1", "blocks.0"]  # no parent of torch


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def check_named(_: str) -> None:
    x = torch.randn(2, 3, 8)
    cases = [
        (Attention(), "attention.out_proj", "attention.out_proj.weight"),
        (Diffusion(), "blocks.0", "blocks.0.norm.time.weight"),
        (Scaled(), "scale", "scale.weight"),
    ]
    for model, unit, param in cases:
        child = model.get_submodule(unit)
        kind, name = type(child).__name__, type(model).__name__
        shard_units(model, [child])
        reason = f"the forward of {name} computes with the parameter {param!r} of the unit {unit!r}"
        with pytest.raises((NotImplementedError, ValueError), match=re.escape(reason)) as caught:
            model(x)
        assert f"({kind}) without calling that" in str(caught.value)
        assert str(caught.value).count("the forward of") == 1


class Beside(nn.Module):
    """It computes with a parameter of another model, which has the name of one of its own."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.scale, self.other = nn.LayerNorm(8), [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x * self.other[0].scale.weight)  # type: ignore[union-attr, operator]


def check_other_model(_: str) -> None:
    other = nn.Sequential(OrderedDict(scale=nn.LayerNorm(8)))
    shard_units(other, other)
    other(torch.randn(2, 3, 8))  # from now on errors know the whole names
    model = Beside(other)
    shard_units(model, [model.scale])
    with pytest.raises((NotImplementedError, ValueError)) as caught:
        model(torch.randn(2, 3, 8))
    assert "the forward of" not in str(caught.value)


def check_recipe(_: str) -> None:
    assert_gradients_like_plain(
        lambda: seeded(Diffusion),
        lambda model: [model.blocks[0].norm.time, *model.blocks],
        lambda model: model(torch.ones(2, 8)).sum(),
    )


@pytest.mark.parametrize("check", [check_named, check_other_model, check_recipe])
def test_on_ranks(check: Callable[[str], None]) -> None:
    run_ranks(check, 2, "")
