"""Models and files that the command line's tests plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

TINY = {
    "model": "tiny",
    "total_params": 1072,
    "groups": [
        {"name": "layer", "count": 2, "tensors": [["up.weight", [16, 16]], ["norm", [8]]]},
        {"name": "root", "tensors": [["embed.weight", [34, 16]]]},
    ],
}


def shapes_file(folder: Path, content: Any = TINY, name: str = "tiny.json") -> str:
    """The path of a new shapes file."""
    path = folder / name
    path.write_text(json.dumps(content))
    return str(path)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.norm = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))


class Tied(nn.Module):
    """Two layers of one kind and one of another; head and embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([Layer(8), Layer(8), Layer(4)])
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.layers[2].up.weight.requires_grad_(False)


class Shared(nn.Module):
    """A parameter of one layer is used by another one too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.layers[1].weight = self.layers[0].weight


def raises() -> nn.Module:
    """Has a mistake."""
    raise ValueError("no such width\nand more lines")


def returns_a_list() -> Any:
    """Is no model."""
    return [1]


def empty() -> nn.Module:
    """Has no parameters."""
    return nn.ReLU()


def leaves() -> nn.Module:
    """Thinks that it is a program."""
    sys.exit(3)


def chatty() -> nn.Module:
    """Prints."""
    print("building")
    return nn.Linear(2, 2)


def lazy() -> nn.Module:
    """Has a parameter without a shape."""
    return nn.LazyLinear(3)


NOT_A_FUNCTION = 3
