"""A module around a sharded one: its ``parameters`` and ``zero_grad`` reach the sharded ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import fully_shard
from vescale_fsdp.engine.unit import unit_of
from vescale_fsdp.testing import run_ranks

WORLD_SIZE = 2


class Around(nn.Module):
    """As Fabric's wrapper, or that of ``torch.compile``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def made(sharding: str) -> tuple[Around, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], sharding=sharding)
    fully_shard(model, sharding=sharding)  # type: ignore[call-overload]
    return Around(model), model


def norm_of(model: nn.Module) -> float:
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))  # type: ignore[misc]


def check_zero_grad(sharding: str) -> None:
    around, model = made(sharding)
    norms = []
    for _ in range(3):
        loss = around(torch.ones(2, 4)).sum()
        around.zero_grad()  # a GAN does this here
        loss.backward()
        norms.append(norm_of(model))
    assert norms[0] == norms[1] == norms[2] > 0


@pytest.mark.parametrize("sharding", ["zero3", "zero2", "zero1", "ddp"])
def test_zero_grad_between_forward_and_backward(sharding: str) -> None:
    run_ranks(check_zero_grad, WORLD_SIZE, sharding)


def check_accumulated(_: str) -> None:
    around, model = made("zero3")
    around(torch.ones(2, 4)).sum().backward()
    wanted = norm_of(model)
    around.zero_grad()
    model.set_requires_gradient_sync(False)
    around(torch.ones(2, 4)).sum().backward()
    around.zero_grad()  # what was accumulated is not in ``.grad`` yet
    model.set_requires_gradient_sync(True)
    around(torch.ones(2, 4)).sum().backward()
    assert norm_of(model) == wanted


def test_zero_grad_drops_what_is_accumulated() -> None:
    run_ranks(check_accumulated, WORLD_SIZE, "")


def check_parameters(sharding: str) -> None:
    around, model = made(sharding)
    before = list(around.named_parameters())
    seen: list[list[bool]] = []

    def look(module: nn.Module, *_: Any) -> None:
        weights = [p for p in module.parameters() if p.dim() == 2]
        seen.append([type(weight) is nn.Parameter for weight in weights])

    model[2].register_forward_hook(look)
    loss = around(torch.ones(2, 4)).sum()
    between = list(around.named_parameters())
    assert [(name, id(p)) for name, p in between] == [(name, id(p)) for name, p in before]
    assert list(around.parameters()) == [p for _, p in between]
    assert not any(unit.is_sharded for unit in [unit_of(model)])
    loss.backward()
    assert seen == [[True]]  # within forward they are what forward computes with


@pytest.mark.parametrize("sharding", ["zero3", "zero1"])
def test_parameters_between_forward_and_backward(sharding: str) -> None:
    run_ranks(check_parameters, WORLD_SIZE, sharding)


def test_other_modules_are_as_before() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plain(torch.ones(2, 2)).sum().backward()
    names = [name for name, _ in plain.named_parameters(prefix="a", recurse=True)]
    assert names == ["a.0.weight", "a.0.bias", "a.1.weight", "a.1.bias"]
    plain.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in plain.parameters())
    plain.zero_grad()
    assert all(p.grad is None for p in plain.parameters())


class Tied(nn.Module):
    """A tied and a frozen parameter, and a unit that a forward may skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(8, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight
        self.second.bias.requires_grad_(False)

    def forward(self, words: Tensor, *, skips: bool = False) -> Tensor:
        x = self.first(self.words(words)).relu()
        return self.head(x if skips else self.second(x))


class AroundTied(Around):
    def forward(self, words: Tensor, *, skips: bool = False) -> Tensor:
        return self.module(words, skips=skips)


def trained_from_outside(sharding: str | None) -> list[float]:
    """Norms of gradients, and sums of weights, of a loop that knows the outer module only."""
    model = Tied()
    for unit in (model.first, model.second, model) if sharding else ():
        fully_shard(unit, sharding=sharding)  # type: ignore[call-overload]
    around = AroundTied(model)
    optimizer = torch.optim.SGD(around.parameters(), 0.05)
    found = []
    for step in range(4):
        for number in range(WORLD_SIZE) if sharding is None else [dist.get_rank()]:
            generator = torch.Generator().manual_seed(10 * step + number)
            words = torch.randint(8, (3,), generator=generator)
            loss = around(words).square().mean() + around(words, skips=True).square().mean()
            if number == 0 or sharding:
                around.zero_grad()
            (loss / (WORLD_SIZE if sharding is None else 1)).backward()
        if step == 1:
            around(words)  # an exception came before its backward
        trained = [param for param in around.parameters() if param.requires_grad]
        found.append(float(nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for param in around.parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        found.append(float(whole.detach().sum()))
    return found


@pytest.mark.parametrize("sharding", ["zero3", "zero2", "ddp"])
def test_a_loop_that_knows_the_outer_module_only(sharding: str) -> None:
    expected = run_ranks(trained_from_outside, WORLD_SIZE, None)[0]
    for found in run_ranks(trained_from_outside, WORLD_SIZE, sharding):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


class ReadsDtype(nn.Module):
    """As models of transformers do: ``self.dtype`` is that of the first parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        return self.layer(x.to(dtype)).to(dtype)


def check_compiled() -> None:
    torch.manual_seed(0)
    plain = ReadsDtype()
    model = nn.Sequential(ReadsDtype(), ReadsDtype())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(2, 4)
    expected = model(x)
    for layer in (*model, plain):  # after the methods of nn.Module were replaced
        layer.compile(backend="eager")
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    whole = torch.compile(plain, backend="eager", fullgraph=True)
    assert torch.equal(whole(x), plain(x))
    whole.zero_grad()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads that of inputs
def test_compiled_models_may_read_their_parameters() -> None:
    run_ranks(check_compiled, 2)
