"""Bytes of optimizer state per parameter: computed from shapes, and counted.

    python -m benchmarks.optimizers.states --model gpt-7m --ranks 1 2 4

It counts the tensors of ``optimizer.state`` on all ranks after a step, without the number of steps.
The rank with the most bytes shows the balance: states on the owner of a matrix are as uneven as the
matrices.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.models import PRESETS, Batches, loss_of
from benchmarks.optimizers.recipes import BLOCK, RECIPES, shard
from benchmarks.optimizers.results import FOLDER, circumstances, read, write
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp.optim import split_named_params
from vescale_fsdp.testing import run_ranks

Shape = tuple[int, ...]


def _adamw(shape: Shape, is_hidden: bool) -> int:
    return 8 * math.prod(shape)  # two moments in fp32


def _adamw8bit(shape: Shape, is_hidden: bool) -> int:
    numel = math.prod(shape)
    # Two codes of a byte, and two scales in fp32 for each block of 256.
    return _adamw(shape, is_hidden) if numel < 4096 else 2 * numel + 8 * math.ceil(numel / 256)


def _muon(shape: Shape, is_hidden: bool) -> int:
    return (4 if is_hidden else 8) * math.prod(shape)  # one momentum; AdamW for the rest


def _shampoo(shape: Shape, is_hidden: bool) -> int:
    if len(shape) < 2:
        return _adamw(shape, is_hidden)
    *stack, rows, cols = shape
    blocks = math.prod(stack) * math.ceil(rows / BLOCK) * math.ceil(cols / BLOCK)
    sides = min(BLOCK, rows) ** 2 + min(BLOCK, cols) ** 2
    return _adamw(shape, is_hidden) + 8 * blocks * sides  # a statistic and a root each


def _soap(shape: Shape, is_hidden: bool) -> int:
    if len(shape) < 2:
        return _adamw(shape, is_hidden)
    *stack, rows, cols = shape
    return 8 * math.prod(stack) * (rows * cols + rows**2 + cols**2)  # a statistic and a basis each


PREDICTED: dict[str, Callable[[Shape, bool], int]] = {
    "AdamW": _adamw,
    "AdamW8bit": _adamw8bit,
    "Muon": _muon,
    "Shampoo": _shampoo,
    "SOAP": _soap,
}


def predict(name: str, model: nn.Module) -> int:
    """Bytes of state of a whole model."""
    hidden, rest = split_named_params(model)
    rule = PREDICTED[name]
    return sum(rule(tuple(p.shape), True) for _, p in hidden) + sum(
        rule(tuple(p.shape), False) for _, p in rest
    )


def count_on_rank(name: str, preset_name: str) -> int:
    """Bytes of state on this rank after a step."""
    preset, recipe = PRESETS[preset_name], RECIPES[name]
    torch.manual_seed(0)
    model = preset.make()
    shard(model, recipe.granularity)
    optimizer = recipe.make(model, 1e-3)
    tokens, targets = Batches(preset, dist.get_rank()).next()
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    return sum(
        _held(tensor)
        for state in optimizer.state.values()
        for key, tensor in state.items()
        if key != "step"
    )


def _held(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def measure(preset_name: str, ranks: list[int]) -> dict[str, Any]:
    """A row for each optimizer."""
    model = PRESETS[preset_name].make()
    numel = sum(param.numel() for param in model.parameters())
    rows: dict[str, Any] = {}
    print(f"{preset_name}, {numel / 1e6:.2f} million parameters: bytes of state a parameter")
    print(f"{'optimizer':10} predicted" + "".join(f"{f'{n} ranks':>12}  most" for n in ranks))
    for name in RECIPES:
        predicted = predict(name, model)
        row: dict[str, Any] = {"predicted": predicted, "per_parameter": round(predicted / numel, 4)}
        line = f"{name:10} {predicted / numel:9.3f}"
        for n in ranks:
            found = run_ranks(count_on_rank, n, name, preset_name, timeout_s=300)
            row[f"{n} ranks"] = {"measured": sum(found), "most_on_a_rank": max(found)}
            line += f"{sum(found) / numel:12.3f} {max(found) * n / sum(found):5.2f}"
            assert sum(found) == predicted, f"{name}: {sum(found)}, predicted {predicted}"
        rows[name] = row
        print(line, flush=True)
    return {"parameters": numel, "optimizers": rows}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Bytes of optimizer state per parameter.")
    parser.add_argument("--model", choices=PRESETS, default="gpt-7m")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--out", type=Path, default=FOLDER / "states.json")
    args = parser.parse_args()
    rows = measure(args.model, args.ranks)
    write(args.out, read(args.out) | {"circumstances": circumstances(), args.model: rows})


if __name__ == "__main__":
    main()
