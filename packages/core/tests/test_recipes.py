"""The blocks of docs/recipes.md run, in order, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("mean", torch.zeros(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        y: Tensor = self.head(self.norm(x - self.mean.to(x.dtype)))
        return y


def run_page(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    names: dict[str, Any] = {
        "Net": Net,
        "folder": folder,
        "micro_batches": [(torch.ones(2, 8), torch.zeros(2, 4))] * 2,
        "model": model,
    }
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    check(names)
    return {"total": names["total"], "penalty": names["penalty"].item()}


def check(names: dict[str, Any]) -> None:
    """That the blocks have done what the page says."""
    model, whole = names["model"], names["whole"]
    step = names["optimizer"].state[names["net"].head.weight]["step"]
    assert (step, names["net"].head.weight.dtype) == (1, torch.float32)
    assert abs(names["total"] - whole.norm().item()) < 1e-5
    assert names["part"].dim() == 1
    assert not model.head.weight.full_tensor()[0].any()
    output, penalty = fully_shard(names["WithPenalty"](Net()))(torch.ones(2, 8))
    (output.sum() + penalty).backward()
    assert penalty.item() > 0
    difference = names["teacher"].head.weight - model.head.weight
    assert difference.full_tensor().abs().max() < 1e-6
    x = torch.ones(3, 8)
    assert torch.equal(names["large"].eval()(x), model.eval()(x))


def test_the_recipes_do_what_they_say(tmp_path: Path) -> None:
    first, second = run_ranks(run_page, 2, tmp_path / "weights")
    assert first == second
