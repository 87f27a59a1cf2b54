"""Compares choices with what was measured: regret, peaks, and the time to choose.

The regret of a choice is its real step divided by that of the fastest candidate whose real peak
fits the budget. Both alternate in one run; the ratio is the median over the rounds, with quartiles.
The fastest of several noisy candidates is faster by chance, so equal candidates have a regret
above 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.compare.spread import ratios
from benchmarks.compare.targets import Verdict
from benchmarks.optimizers.results import ROOT, read
from benchmarks.tune.candidates import named, parse

__all__ = ["FOLDER", "Choice", "choices_of", "lines", "load_all", "peak_lines", "verdicts"]

FOLDER = ROOT / "benchmarks" / "results" / "tune"
MEDIAN_REGRET, WORST_REGRET = 1.03, 1.10
PEAK_ABOVE = 0.10  # of the measured one
MOST_S = 10.0


class Choice(NamedTuple):
    """What one budget chose.

    Attributes:
        budget: its name.
        regret: quartiles.
        fastest: text of the fastest candidate that fits.
    """

    budget: str
    regret: tuple[float, float, float]
    fastest: str
    entry: dict[str, Any]


def load_all(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Read the cells, by name."""
    return {path.stem: read(path) for path in sorted(folder.glob("*.json"))}


def choices_of(cell: Mapping[str, Any]) -> Iterator[Choice]:
    """Judge the choices of a cell."""
    tried = cell["candidates"]
    for budget, entry in cell["choices"].items():
        fitting = [t for t, each in tried.items() if each["peak_bytes"] <= entry["budget_bytes"]]
        chosen = entry["chosen"]["candidate"]
        fastest = min(
            [*fitting, chosen], key=lambda text: (median(tried[text]["step_s"]), text != chosen)
        )
        regret = ratios(tried[chosen]["step_s"], tried[fastest]["step_s"])
        assert regret is not None, "both were measured"
        yield Choice(budget, regret, fastest, entry)


def lines(folder: Path = FOLDER) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of choices."""
    head = [
        "model", "network", "budget", "MiB", "chosen", "step ms: predicted, measured",
        "peak MiB: predicted, measured", "fastest that fits", "its ms", "regret", "to choose, s",
    ]  # fmt: skip
    rows = []
    for cell in load_all(folder).values():
        tried = cell["candidates"]
        for choice in choices_of(cell):
            entry = choice.entry
            chosen = entry["chosen"]
            real = tried[chosen["candidate"]]
            low, middle, high = choice.regret
            rows.append(
                [
                    cell["model"], cell["network"], choice.budget,
                    f"{entry['budget_bytes'] / 2**20:.1f}", _name(cell, chosen["candidate"]),
                    f"{1e3 * chosen['step_s']:.0f}, {1e3 * median(real['step_s']):.0f}",
                    f"{chosen['peak_bytes'] / 2**20:.1f}, {real['peak_bytes'] / 2**20:.1f}",
                    _name(cell, choice.fastest),
                    f"{1e3 * median(tried[choice.fastest]['step_s']):.0f}",
                    f"{middle:.3f} ({low:.2f} to {high:.2f})", f"{entry['seconds']:.1f}",
                ]
            )  # fmt: skip
    return head, rows


def peak_lines(folder: Path = FOLDER) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of all candidates: predicted and measured."""
    head = [
        "model", "network", "candidate", "step ms: predicted, measured", "error %",
        "peak MiB: predicted, measured", "error %",
    ]  # fmt: skip
    rows = []
    for cell in load_all(folder).values():
        predicted = _predictions(cell)
        for text, real in cell["candidates"].items():
            step, peak = median(real["step_s"]), real["peak_bytes"]
            row = [cell["model"], cell["network"], _name(cell, text)]
            own = predicted[text]
            row += [f"{1e3 * own['step_s']:.0f}, {1e3 * step:.0f}"]
            row += [f"{100 * (own['step_s'] / step - 1):+.0f}"]
            row += [f"{own['peak_bytes'] / 2**20:.1f}, {peak / 2**20:.1f}"]
            row += [f"{100 * (own['peak_bytes'] / peak - 1):+.1f}"]
            rows.append(row)
    return head, rows


def _predictions(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Predictions by candidate: of the grid, and of what was chosen beside it."""
    chosen = [choice["chosen"] for choice in cell["choices"].values()]
    return {each["candidate"]: each for each in (*chosen, *cell["predictions"])}


def _name(cell: Mapping[str, Any], text: str) -> str:
    units = parse(next(iter(cell["candidates"]))).units  # the grid's
    return named(parse(text), units)


def verdicts(cells: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[Verdict]:
    """Compare with what is aimed at."""
    found = load_all() if cells is None else cells
    regrets = []
    for cell in found.values():
        where = f"{cell['model']}, {cell['ranks']} ranks, {cell['network']}"
        for choice in choices_of(cell):
            regrets.append(choice.regret[1])
            at = f"{where}, {choice.budget} budget"
            seconds = choice.entry["seconds"]
            target = f"a choice at most {WORST_REGRET:.2f} of the fastest real step"
            is_met = choice.regret[1] <= WORST_REGRET
            yield Verdict(target, at, f"{choice.regret[1]:.3f}", is_met)
            target = f"time to choose at most {MOST_S:.0f} s"
            yield Verdict(target, at, f"{seconds:.1f}", seconds <= MOST_S)
        for text, own in _predictions(cell).items():
            ratio = own["peak_bytes"] / cell["candidates"][text]["peak_bytes"] - 1
            target = f"predicted peak 0 to {PEAK_ABOVE:.0%} above the measured one"
            at = f"{where}, {_name(cell, text)}"
            yield Verdict(target, at, f"{ratio:+.1%}", 0 <= ratio <= PEAK_ABOVE)
    if regrets:
        middle = median(regrets)
        target = f"median of choices at most {MEDIAN_REGRET:.2f} of the fastest real step"
        at = f"{len(regrets)} budgets"
        yield Verdict(target, at, f"{middle:.3f}", middle <= MEDIAN_REGRET)
