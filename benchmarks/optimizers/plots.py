"""Draws the results of the benchmarks in this folder.

    python -m benchmarks.optimizers.plots --out docs/images

It needs matplotlib, and writes an SVG and a PNG for each figure. Figures without results are
skipped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib as mpl
from benchmarks.optimizers.results import FOLDER, ROOT, read

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = {
    "AdamW": "#4d4d4d",
    "AdamW8bit": "#e69f00",
    "Muon": "#0072b2",
    "Shampoo": "#009e73",
    "SOAP": "#cc3311",
}
WAYS = {"ours": "#0072b2", "LPT": "#e69f00", "holders only": "#4d4d4d"}
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "svg.fonttype": "none",  # letters stay letters: a small file, and the reader's font
    "svg.hashsalt": "optimizers",  # the same file each time
}


def curves() -> Figure | None:
    """Validation loss by step, and at the end by learning rate."""
    found = {name: read(FOLDER / "curves" / f"{name}.json") for name in COLORS}
    found = {name: values for name, values in found.items() if "summary" in values}
    if not found:
        return None
    figure, (by_step, by_rate) = plt.subplots(1, 2, figsize=(8, 3.2), width_ratios=[3, 2])
    for name, values in found.items():
        _curve(by_step, name, values)
        tries = values["summary"]["tries"]
        rates = [float(rate) for rate in tries]
        by_rate.plot(rates, list(tries.values()), "o-", ms=3, lw=1.2, color=COLORS[name])
    by_step.set(xlabel="step", ylabel="validation loss, nats per character", ylim=(None, 3.2))
    by_step.set_title("three seeds: mean, lowest and highest", fontsize=9)
    by_step.legend()
    by_rate.set(xscale="log", xlabel="learning rate")
    rates = sorted({float(rate) for each in found.values() for rate in each["summary"]["tries"]})
    by_rate.set_xticks(rates, [f"{rate:g}" for rate in rates])
    by_rate.minorticks_off()
    by_rate.set_title("last step, seed 0", fontsize=9)
    return figure


def _curve(axes: Axes, name: str, values: dict[str, Any]) -> None:
    lr, seeds = values["summary"]["learning_rate"], values["settings"]["seeds"]
    runs = [values["runs"][f"lr {lr}, seed {seed}"]["validation"] for seed in seeds]
    steps = [step for step, _ in runs[0]]
    losses = [[loss for _, loss in each] for each in zip(*runs, strict=True)]
    axes.plot(steps, [mean(each) for each in losses], lw=1.4, color=COLORS[name], label=name)
    low, high = [min(each) for each in losses], [max(each) for each in losses]
    axes.fill_between(steps, low, high, color=COLORS[name], alpha=0.15, lw=0)


def costs() -> Figure | None:
    """Bytes of state, and bytes and time of Muon's step."""
    states, steps = read(FOLDER / "states.json"), read(FOLDER / "muon_step.json")
    models = [key for key in states if key != "circumstances"]
    if not models or not steps:
        return None
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(8, 2.8))
    rows = states[models[0]]["optimizers"]
    _bars(left, {name: row["per_parameter"] for name, row in rows.items()}, COLORS, "{:.2f}")
    left.set_title(f"bytes of state per parameter, {models[0]}", fontsize=9)
    key, entry = next(iter(steps.items()))
    engines, colors = entry["engines"], dict.fromkeys(entry["engines"], "#999999")
    colors["vescale"] = COLORS["Muon"]
    sent = {name: each["sent_bytes"] / 1e6 for name, each in engines.items()}
    _bars(middle, sent, colors, "{:.1f}")
    middle.set_title("Muon: MB sent by a rank", fontsize=9)
    times = {name: 1000 * median(each["step_s"]) for name, each in engines.items()}
    _bars(right, times, colors, "{:.0f}")
    right.set_title("Muon: ms per step", fontsize=9)
    figure.supxlabel(f"Muon: {key}", fontsize=8)
    return figure


def _bars(axes: Axes, values: dict[str, float], colors: dict[str, str], form: str) -> None:
    names = list(values)[::-1]
    bars = axes.barh(
        names, [values[name] for name in names], color=[colors[name] for name in names]
    )
    axes.bar_label(bars, [form.format(values[name]) for name in names], padding=2, fontsize=8)
    axes.margins(x=0.2)
    axes.grid(visible=False, axis="y")


def owners() -> Figure | None:
    """Balance and elements to send, for each model and number of ranks."""
    rows = read(FOLDER / "owners.json").get("rows")
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(5, 3))
    for way, color in WAYS.items():
        points = [(row[way]["moved"], row[way]["makespan"], row["ranks"]) for row in rows]
        moved, makespans, ranks = zip(*points, strict=True)
        sizes = [{4: 14, 8: 28, 64: 56}.get(n, 28) for n in ranks]
        axes.scatter(moved, makespans, s=sizes, color=color, alpha=0.7, lw=0, label=way)
    axes.set(xlabel="fraction of elements to send", ylabel="highest load / lower bound")
    axes.legend()
    return figure


FIGURES = {"optimizer-curves": curves, "optimizer-costs": costs, "optimizer-owners": owners}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draw the figures of docs/optimizers.md.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw()
            if figure is None:
                print(f"{name}: not measured yet")
                continue
            figure.savefig(args.out / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
            print(f"{name}: written")


if __name__ == "__main__":
    main()
