"""The part of the grid that is in the project's README: one picture, one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.compare.grid import LABELS, MODELS, Cell
from benchmarks.compare.record import Record
from benchmarks.compare.summary import Summary, summarize
from benchmarks.models import PRESETS

__all__ = ["ROWS", "found_in", "mega", "table", "write"]

RANKS, PRECISION = 2, "fp32"
NAMES = {
    "gpt-7m": "GPT",
    "moe-10m": "mixture of experts",
    "vit-6m": "vision transformer",
    "norms-1500": "1,500 parameters",
}
# For each row its network, the function for its value, and the format.
ROWS: dict[str, tuple[str, Callable[[Summary], float | None], str]] = {
    "ms a step at 1 Gbit/s": ("1gbit", lambda each: 1e3 * each.step_s[1], ".0f"),
    "ms a step over loopback": ("loopback", lambda each: 1e3 * each.step_s[1], ".0f"),
    "MB sent in a step": ("loopback", lambda each: mega(each.sent_bytes), ".1f"),
    "MB of tensors at most": ("loopback", lambda each: mega(each.tensor_bytes), ".1f"),
}
BEGIN, END = "<!-- python -m benchmarks.report -->", "<!-- end -->"


def found_in(records: Mapping[Cell, Record], model: str, network: str) -> dict[str, Summary]:
    """Return summaries by engine; {} if the cell was not measured."""
    cell = Cell(model, RANKS, network, PRECISION)
    if cell not in records:
        return {}
    return {each.engine: each for each in summarize(records, cell) if each.engine in LABELS}


def table(records: Mapping[Cell, Record]) -> str:
    """Return the table as Markdown, with the lowest value of each row in bold."""
    lines = ["| | | " + " | ".join(LABELS.values()) + " |", "|---" * (2 + len(LABELS)) + "|"]
    for model in MODELS:
        name = f"{NAMES[model]}, {_millions(model)}"
        for title, (network, value_of, form) in ROWS.items():
            found = found_in(records, model, network)
            values = {key: value_of(each) for key, each in found.items()}
            known = [value for value in values.values() if value is not None]
            if not known:
                continue
            texts = [_text(values.get(key), form, min(known)) for key in LABELS]
            lines.append(f"| {name} | {title} | " + " | ".join(texts) + " |")
            name = ""
    return "\n".join(lines)


def write(records: Mapping[Cell, Record], readme: Path) -> None:
    """Replace the table in the README."""
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(f"{before}{BEGIN}\n{table(records)}\n{END}{after}")


def _text(value: float | None, form: str, least: float) -> str:
    if value is None:
        return ""
    text = f"{value:{form}}"
    return f"**{text}**" if text == f"{least:{form}}" else text


def _millions(model: str) -> str:
    count = sum(param.numel() for param in PRESETS[model].make().parameters())
    return f"{count / 1e6:.1f} M"


def mega(value: float | None) -> float | None:
    """In millions."""
    return None if value is None else value / 1e6
