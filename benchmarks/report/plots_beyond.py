"""Draws results outside of the grid: rank 0 of large worlds, computed steps of large models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import scale
from benchmarks.cost_model import large
from benchmarks.optimizers.results import read
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

__all__ = ["makers"]

COLORS = {"vescale": "#0072b2", "fsdp2": "#e69f00"}
LABELS = {"vescale": "veScale-FSDP", "fsdp2": "FSDP2"}


def makers() -> dict[str, Callable[[], Figure]]:
    """Return a function for each picture that has results, by its name."""
    readings = {path.stem: read(path)["readings"] for path in sorted(scale.FOLDER.glob("*.json"))}
    figures = list(read(large.FILE).get("figures", {}).values())
    found: dict[str, Callable[[], Figure]] = {}
    if readings:
        found["scale"] = lambda: _peaks(readings)
    if figures:
        found["large"] = lambda: _computed(figures)
    return found


def _peaks(readings: dict[str, dict[str, Any]]) -> Figure:
    """Peak of tensors on rank 0 over the number of ranks, model by model."""
    figure, axes = plt.subplots(1, len(readings), figsize=(2.3 * len(readings), 2.8), squeeze=False)
    for column, (model, kept) in zip(axes[0], readings.items(), strict=True):
        fake = {int(key.split()[1]): each for key, each in kept.items() if key.startswith("fake")}
        for engine, color in COLORS.items():
            known = [n for n in sorted(fake) if not fake[n][engine]["left_out"]]
            peaks = [fake[n][engine]["peak_bytes"] / 1e6 for n in known]
            column.plot(known, peaks, "-o", ms=3, lw=1.4, color=color, label=LABELS[engine])
        _ranks(column, sorted(fake))
        column.set_yscale("log")
        column.set_title(model, fontsize=9)
    axes[0][0].set_ylabel("peak of tensors, MB")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _computed(figures: list[dict[str, Any]]) -> Figure:
    """Computed tokens per second and GPU over the number of GPUs."""
    models = list(dict.fromkeys(each["model"] for each in figures))
    figure, axes = plt.subplots(1, len(models), figsize=(3.2 * len(models), 3.2), squeeze=False)
    for column, model in zip(axes[0], models, strict=True):
        own = [each for each in figures if each["model"] == model]
        for engine, color in COLORS.items():
            for replicates, style in ((False, "--"), (True, "-")):
                line = [
                    each
                    for each in own
                    if each["engine"] == engine and (each["shards"] < each["ranks"]) == replicates
                ]
                line.sort(key=lambda each: each["ranks"])
                kind = "replicas of 128" if replicates else "sharded over all"
                column.plot(
                    [each["ranks"] for each in line],
                    [each["tokens_per_s"] / each["ranks"] for each in line],
                    style,
                    marker="o",
                    ms=3,
                    lw=1.4,
                    color=color,
                    label=f"{LABELS[engine]}, {kind}",
                )
        _ranks(column, sorted({each["ranks"] for each in own}))
        column.set_ylim(bottom=0)
        column.set_title(f"{model}: computed", fontsize=9)
    axes[0][0].set_ylabel("tokens per second and GPU")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _ranks(column: Any, ranks: list[int]) -> None:
    column.set(xscale="log", xlabel="ranks")
    column.set_xticks(ranks, [str(each) for each in ranks], fontsize=7)
    column.minorticks_off()
