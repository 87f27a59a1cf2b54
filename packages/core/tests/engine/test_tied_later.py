"""Parameters that are tied after ``fully_shard``, as loaders do with models made on meta."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import fully_shard
from vescale_fsdp.ragged import distribute_tensor
from vescale_fsdp.testing import run_ranks

from .helpers import full_parameters

OPTIONS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero1": {"sharding": "zero1"},
    "ddp": {"sharding": "ddp"},
}


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)).tanh())  # type: ignore[no-any-return]


def made(own_units: tuple[str, ...] = (), **options: Any) -> Language:
    torch.manual_seed(0)
    model = Language()
    for name in own_units:
        fully_shard(model.get_submodule(name), **options)
    return fully_shard(model, **options)


def expected() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Language()
    model.head.weight = model.embed.weight
    return trained(model, None)


def trained(model: Language, rank: int | None) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    tokens = torch.arange(6).view(2, 3)
    for _ in range(3):
        mine = tokens if rank is None else tokens[rank : rank + 1]
        nn.functional.cross_entropy(model(mine).flatten(0, 1), mine.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == 3
    return full_parameters(model)


def told(tells: bool = True) -> Any:
    if not tells:
        return contextlib.nullcontext()
    return pytest.warns(UserWarning, match=r"were tied after fully_shard: \{'head.weight'")


def check_tied(own_units: tuple[str, ...], options: dict[str, Any]) -> None:
    for when in ("first", "after a load", "before a load", "in a copy", "after a forward"):
        model = made(own_units, **options)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        if when == "after a forward":
            model(torch.arange(6).view(2, 3)).sum().backward()
            model.zero_grad()
        if when == "after a load":
            model.load_state_dict(state)
        model.head.weight = model.embed.weight
        if when == "before a load":
            model.load_state_dict(state | {"head.weight": state["embed.weight"]})
        if when == "in a copy":
            model = copy.deepcopy(model)
        with told(when != "after a forward"):
            found = trained(model, dist.get_rank())
        torch.testing.assert_close(found, expected(), msg=lambda m, when=when: f"{when}: {m}")


UNITS: list[tuple[str, ...]] = [(), ("embed",), ("head", "body"), ("embed", "head")]
CASES = [(units, "zero3") for units in UNITS] + [(("embed",), "zero1"), (("head", "body"), "ddp")]


@pytest.mark.parametrize(("own_units", "name"), CASES)
@pytest.mark.sampled(4)
def test_they_train_as_one(own_units: tuple[str, ...], name: str) -> None:
    run_ranks(check_tied, 2, own_units, OPTIONS[name])


def made_on_meta() -> None:
    """The weights come in a state dict, then the tie, then the optimizer."""
    with torch.device("meta"):
        model = Language()
    fully_shard(model.body)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    whole = Language().state_dict()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(distribute_tensor(whole[name], param.device_mesh, param.placements))
    model.head.weight = model.embed.weight
    with told():
        found = trained(model, dist.get_rank())
    torch.testing.assert_close(found, expected())


def test_in_a_model_that_was_made_on_meta() -> None:
    run_ranks(made_on_meta, 2)
