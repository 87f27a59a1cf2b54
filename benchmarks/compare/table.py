"""A table of the engines in one cell, for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.compare.grid import Cell
from benchmarks.compare.measure import Result
from benchmarks.compare.summary import Quartiles, Summary
from rich.table import Table

__all__ = ["spread_text", "table_of"]


def spread_text(ratio: Quartiles | None) -> str:
    """Median and quartiles."""
    return "" if ratio is None else f"{ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})"


def _scaled(value: float | None, factor: float, form: str) -> str:
    return "" if value is None else f"{value * factor:{form}}"


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "ms a step": lambda each: _scaled(each.step_s[1], 1e3, ".0f"),
    "quartiles": lambda each: f"{1000 * each.step_s[0]:.0f} to {1000 * each.step_s[2]:.0f}",
    "tokens/s": lambda each: f"{each.tokens_per_s:.0f}",
    "speed / FSDP2": lambda each: spread_text(each.speed),
    "of the limit": lambda each: "" if each.of_limit is None else f"{each.of_limit[1]:.2f}",
    "CPU ms": lambda each: _scaled(each.cpu_s, 1e3, ".0f"),
    "of the host": lambda each: _scaled(each.host_s, 1e3, ".0f"),
    "MB sent": lambda each: _scaled(each.sent_bytes, 1e-6, ".2f"),
    "MB copied": lambda each: _scaled(each.copied_bytes, 1e-6, ".1f"),
    "tensors MB": lambda each: _scaled(each.tensor_bytes, 1e-6, ".1f"),
    "resident MB": lambda each: _scaled(each.resident_bytes, 1e-6, ".0f"),
    "loss": lambda each: "" if each.loss_difference is None else f"{each.loss:.5f}",
    "off DDP": lambda each: _scaled(each.loss_difference, 1.0, ".1e"),
}


def table_of(cell: Cell, summaries: list[Summary], engines: dict[str, Result]) -> Table:
    """Return a table without empty columns. Below it are the engines that were left out."""
    columns = {title: [text_of(each) for each in summaries] for title, text_of in COLUMNS.items()}
    columns = {title: texts for title, texts in columns.items() if any(texts)}
    table = Table(title=str(cell), title_justify="left", caption_justify="left")
    table.add_column("engine", no_wrap=True)
    for title in columns:
        table.add_column(title, justify="right")
    for index, each in enumerate(summaries):
        table.add_row(each.engine, *(texts[index] for texts in columns.values()))
    left_out = [
        f"{name} left out: {each.left_out}" for name, each in engines.items() if each.left_out
    ]
    table.caption = "\n".join(left_out) or None
    return table
