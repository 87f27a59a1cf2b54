"""FSDP2 and ours, side by side: the same function runs with each, and says what it has seen.

And the small models that such functions look at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import vescale_fsdp
from vescale_fsdp.testing import run_ranks


@dataclass(frozen=True)
class Library:
    """The functions of one of the two."""

    fully_shard: Any
    register_fsdp_forward_method: Callable[[nn.Module, str], None]
    share_comm_ctx: Callable[[list[Any]], None]

    def shard(self, model: nn.Module, *parts: nn.Module, **options: Any) -> Any:
        """Each part is a unit, and the rest of the model is one more."""
        for part in parts:
            self.fully_shard(part, **options)
        return self.fully_shard(model, **options)


LIBRARIES = {
    name: Library(module.fully_shard, module.register_fsdp_forward_method, module.share_comm_ctx)
    for name, module in (("fsdp2", torch.distributed.fsdp), ("ours", vescale_fsdp))
}

Observe = Callable[[Library], Any]
Register = Callable[[Observe], Observe]
Outcome = tuple[str, Any]  # "returned" and a value, or the name of an error and its text
Outcomes = dict[tuple[str, str], list[Outcome]]  # by library and function, one of each rank


def sees(table: dict[Observe, Any], expected: Any) -> Register:
    """Put a function into a table, with what it is to say."""

    def register(observe: Observe) -> Observe:
        table[observe] = expected
        return observe

    return register


def observe_all(functions: Sequence[Observe], world_size: int) -> Outcomes:
    """Run each function with each library, on ranks that are started once for all of them."""
    per_rank = run_ranks(_outcomes, world_size, list(functions), timeout_s=120)
    return {key: [found[key] for found in per_rank] for key in per_rank[0]}


def _outcomes(functions: Sequence[Observe]) -> dict[tuple[str, str], Outcome]:
    return {
        (name, observe.__name__): _outcome(observe, library)
        for observe in functions
        for name, library in LIBRARIES.items()
    }


def _outcome(observe: Observe, library: Library) -> Outcome:
    torch.manual_seed(0)
    try:
        return "returned", observe(library)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what the test is about
        return type(error).__name__, str(error)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(linear() for _ in range(count)))


def ones() -> Tensor:
    """Two rows: the gradient of a last layer's weight is 2 everywhere, if the loss is the sum."""
    return torch.ones(2, 4)


def whole(tensor: Tensor) -> list[Any]:
    """A sharded tensor as nested lists of numbers."""
    numbers: list[Any] = tensor.full_tensor().tolist()  # type: ignore[attr-defined]
    return numbers


def number(gradient: Tensor | None) -> float | None:
    """The one number that a gradient consists of."""
    if gradient is None:
        return None
    (value,) = set(gradient.full_tensor().flatten().tolist())  # type: ignore[attr-defined]
    return float(value)


def is_sharded(module: nn.Module) -> bool:
    """Whether the module holds its sharded parameters now."""
    return isinstance(module.weight, DTensor)


def gradient_after(model: Any, scale: float = 1.0) -> float | None:
    """The gradient of a linear model's weight after one more backward; the loss is scaled."""
    (scale * model(ones())).sum().backward()
    return number(model.weight.grad)
