"""The grid: which cells there are, and how each is named."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

__all__ = ["ENGINES", "LABELS", "MODELS", "Cell", "cells", "place_of"]

ENGINES = ["vescale", "fsdp2", "deepspeed", "ddp", "compute"]
LABELS = {"vescale": "veScale-FSDP", "fsdp2": "FSDP2", "deepspeed": "ZeRO-3", "ddp": "DDP"}
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
        """Where its results are kept, in the folder of results."""
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


def place_of(cell: Cell) -> tuple[object, ...]:
    """To sort by: loopback before limited networks, fp32 before bf16."""
    index = MODELS.index(cell.model) if cell.model in MODELS else len(MODELS)
    is_limited = cell.rate is not None
    return index, cell.model, cell.ranks, is_limited, cell.network, cell.precision != "fp32"
