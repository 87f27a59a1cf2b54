"""The grid: its cells, and their names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

__all__ = ["ENGINES", "LABELS", "MODELS", "PAIRS", "Cell", "cells", "engines_of", "place_of"]

LABELS = {
    "vescale": "veScale-FSDP",
    "vescale-tuned": "veScale-FSDP, tuned",
    "fsdp2": "FSDP2",
    "fsdp2-tuned": "FSDP2, tuned",
    "deepspeed": "ZeRO-3, tuned",
    "ddp": "DDP",
}
ENGINES = [*LABELS, "compute"]
# Pairs to compare: defaults with defaults, tuned with tuned; DDP has no settings.
PAIRS = [
    ("vescale", "fsdp2"),
    ("vescale", "ddp"),
    ("vescale-tuned", "fsdp2-tuned"),
    ("vescale-tuned", "deepspeed"),
    ("vescale-tuned", "ddp"),
]
MODELS = ["gpt-7m", "moe-10m", "vit-6m", "norms-1500"]


@dataclass(frozen=True)
class Cell:
    """One point of the grid.

    Attributes:
        model: one of `benchmarks.models.PRESETS`.
        ranks: processes.
        network: "loopback", or a rate as ``tc`` writes it.
        precision: "fp32" or "bf16".
    """

    model: str
    ranks: int
    network: str
    precision: str

    def __str__(self) -> str:
        return f"{self.model}, {self.ranks} ranks, {self.network}, {self.precision}"

    @property
    def file_name(self) -> str:
        """The name of its file in the folder of results."""
        return f"{self.model}_{self.ranks}_{self.network}_{self.precision}.json"

    @property
    def rate(self) -> str | None:
        """Of the limited network; None: loopback."""
        return None if self.network == "loopback" else self.network


def cells(
    models: list[str], ranks: list[int], networks: list[str], precisions: list[str]
) -> list[Cell]:
    """All combinations, those of one model after each other."""
    return [Cell(*each) for each in product(models, ranks, networks, precisions)]


def engines_of(cell: Cell, engines: list[str]) -> list[str]:
    """Return the engines of a cell. On a limited network ``compute`` also adds ``wire``.

    The longer of these two is a lower bound for a step.
    """
    bounds = cell.rate is not None and "compute" in engines and "wire" not in engines
    return [*engines, "wire"] if bounds else engines


def place_of(cell: Cell) -> tuple[object, ...]:
    """Return a sort key: loopback before limited networks, fp32 before bf16."""
    index = MODELS.index(cell.model) if cell.model in MODELS else len(MODELS)
    is_limited = cell.rate is not None
    return index, cell.model, cell.ranks, is_limited, cell.network, cell.precision != "fp32"
