"""Modules of torch that go to C++ or keep their parameters elsewhere, too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .asking import (
    CLASSES,
    ROWS,
    WIDTH,
    Answers,
    Block,
    Case,
    Cases,
    Outcomes,
    answer,
    as_one_process,
    backward,
    in_settings,
    named,
    pair,
)

Call = Callable[[Any, Tensor], Tensor]


def called(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    return y


def first_of(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module(x)[0]
    return y


class Around(nn.Module):
    """Calls a module in its own way."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.module, x)


class Two(nn.Module):
    """Two such modules, and a head."""

    def __init__(self, make: Callable[[], nn.Module], call: Call) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Around(make(), call) for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def flattened(module: Any, x: Tensor) -> Tensor:
    module.flatten_parameters()
    return first_of(module, x)


def attended(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module(x, x, x, need_weights=False)[0]
    return y


def by_product(module: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*module(x).chunk(3, -1))


def twice(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module(x, x)
    return y


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.LSTM(WIDTH, WIDTH, batch_first=True), "weight_hh_l0")


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, by another category in each version
        made: nn.Module = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH))
    return made


LSTM: dict[str, Any] = {"batch_first": True}
KINDS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "LSTM": (lambda: nn.LSTM(WIDTH, WIDTH, **LSTM), first_of),
    "LSTM of both directions": (
        lambda: nn.LSTM(WIDTH, WIDTH // 2, 2, bidirectional=True, **LSTM),
        flattened,
    ),
    "LSTM with weight norm": (old_weight_norm, first_of),
    "GRU": (lambda: nn.GRU(WIDTH, WIDTH, **LSTM), first_of),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), attended),
    "TransformerEncoderLayer": (encoder_layer, called),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), called),
    "attention": (lambda: nn.Linear(WIDTH, 3 * WIDTH), by_product),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.GroupNorm(3, 3)),
        called,
    ),
    "Bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), twice),
    "fx": (lambda: fx.symbolic_trace(Block()), called),
}


def sequences(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 3, WIDTH, dtype=torch.float64, generator=generator)


def trained_and_evaluated(model: Any, x: Tensor) -> list[Tensor]:
    backward(model, x)
    model.eval()
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(model(x).clone())
    model.train()
    return found


def modules_themselves(model: Any) -> list[nn.Module]:
    """The units are the modules, not what is around them."""
    return [block.module for block in model.blocks]


def cell(module: Any, x: Tensor) -> Tensor:
    return torch.stack([module(step)[0] for step in x.unbind(1)], 1)


class Embedded(nn.Module):
    """Rows that are used are given a norm of at most 0.5, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(2 * ROWS, WIDTH, max_norm=0.5)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks[0](tokens))


def all_tokens(model: Any, x: Tensor) -> Tensor:
    """The same on all ranks: a renormalization of one rank is not sent to the others."""
    loss = model(torch.arange(ROWS)).square().mean()
    loss.backward()
    return loss.detach()


class Counts(TorchDispatchMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.number = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += self.name in str(func)
        return func(*args, **(kwargs or {}))


def fast_path() -> None:
    """Evaluations take the fused operator as often as in one process."""
    counted = []
    for model in pair(lambda: Two(encoder_layer, called)):
        model.eval()
        with torch.inference_mode(), Counts("_transformer_encoder_layer_fwd") as counts:
            model(sequences(0))
        counted.append(counts.number)
    assert counted == [2, 2]


def export() -> None:
    """It is refused, with FSDP2, too."""
    _, model = pair()
    with pytest.raises(RuntimeError):
        torch.export.export(model, (sequences(0),))


def scripted() -> None:
    """Traced by `torch.jit`, a module has its parameters in C++: refused by `fully_shard`."""
    with pytest.raises((TypeError, ValueError), match=r"torch\.jit"):
        pair(lambda: Two(traced, called))


def cases() -> Cases:
    found: Cases = {}
    options: dict[str, Any] = {"run": trained_and_evaluated, "data": sequences, "rests": True}
    for name, (kind, call) in KINDS.items():
        make = lambda kind=kind, call=call: Two(kind, call)  # noqa: E731
        found |= in_settings(name, as_one_process, make=make, **options)
    for name in ("LSTM", "MultiheadAttention"):
        kind, call = KINDS[name]
        found[f"{name}, a unit itself"] = Case(
            lambda kind=kind, call=call: as_one_process(
                lambda: Two(kind, call), units=modules_themselves, **options
            )
        )
    found["LSTMCell"] = Case(
        lambda: as_one_process(lambda: Two(lambda: nn.LSTMCell(WIDTH, WIDTH), cell), **options)
    )
    found |= in_settings("Embedding with max_norm", as_one_process, make=Embedded, run=all_tokens)
    found["fast path"] = Case(fast_path)
    found["torch.jit"] = Case(scripted)
    found["torch.export"] = Case(export)
    return found


CASES = cases()


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.parametrize("name", named(CASES))
def test_modules_of_any_kind_train_as_in_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
