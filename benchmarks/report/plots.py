"""Draws the results, each picture as SVG and PNG, in colours for colour-blind readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from benchmarks.compare.grid import LABELS, MODELS, Cell
from benchmarks.compare.record import Record
from benchmarks.compare.spread import ratios
from benchmarks.compare.summary import Summary, summarize
from benchmarks.optimizers.plots import STYLE
from benchmarks.report import headline, plots_beyond

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["draw"]

# Okabe and Ito's colours, with hatches for grey prints.
COLORS = {
    "vescale": "#0072b2",
    "vescale-tuned": "#56b4e9",
    "fsdp2": "#e69f00",
    "fsdp2-tuned": "#f0e442",
    "deepspeed": "#cc79a7",
    "ddp": "#999999",
}
HATCHES = {
    "vescale": "",
    "vescale-tuned": "",
    "fsdp2": "///",
    "fsdp2-tuned": "///",
    "deepspeed": "xxx",
    "ddp": "...",
}
WIDEST = 3.0  # of the speeds that are drawn
PEERS = {"ours": "#0072b2", "fsdp2": "#e69f00", "megatron": "#cc79a7"}
PEER_LABELS = {"ours": "veScale-FSDP", "fsdp2": "FSDP2", "megatron": "Megatron-FSDP v2"}
ROW_STYLES = {None: "-", 1: "--", 16: "-.", 128: ":"}
PADDED = ["GPT-OSS-120B (HF), layer", "DeepSeek-V3-671B, MoE layer", "Llama-3-70B, layer"]


def draw(records: Mapping[Cell, Record], padding: dict[str, Any], folder: Path) -> list[Path]:
    """Draw all pictures that have results. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[], Figure]] = {}
    if records:
        makers |= {
            "headline": lambda: _headline(records),
            "compare-speed": lambda: _speed(records),
            "compare-costs": lambda: _costs(records),
        }
    if padding:
        makers["padding"] = lambda: _padding(padding["plans"])
    makers |= plots_beyond.makers()
    written = []
    with mpl.rc_context(STYLE | {"svg.hashsalt": "compare", "hatch.linewidth": 0.4}):
        for name, make in makers.items():
            figure = make()
            written.append(folder / f"{name}.svg")
            figure.savefig(written[-1], metadata={"Date": None})
            plt.close(figure)
    return written


def _headline(records: Mapping[Cell, Record]) -> Figure:
    """The README's table as a picture, with a panel for each kind of row."""
    figure, axes = plt.subplots(1, len(headline.ROWS), figsize=(2.5 * len(headline.ROWS), 3.4))
    height = 0.8 / len(LABELS)
    for column, (title, (network, value_of, _)) in zip(axes, headline.ROWS.items(), strict=True):
        for place, model in enumerate(MODELS):
            found = headline.found_in(records, model, network)
            for index, name in enumerate(LABELS):
                y = place + (index - (len(LABELS) - 1) / 2) * height
                value = value_of(found[name]) if name in found else None
                _bar(column, y, value or 0.0, height, name, is_first=model == MODELS[0])
        column.set_title(title, fontsize=9)
        column.set_yticks(range(len(MODELS)), MODELS if column is axes[0] else [""] * len(MODELS))
        column.set_ylim(len(MODELS) - 0.5, -0.5)
        column.grid(visible=False, axis="y")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(LABELS), fontsize=8)
    return figure


def _bar(
    axes: Axes, y: float, value: float, height: float, name: str, *, is_first: bool, **more: Any
) -> None:
    axes.barh(
        y,
        value,
        height,
        color=COLORS[name],
        hatch=HATCHES[name],
        edgecolor="white",
        label=LABELS[name] if is_first else None,
        **more,
    )


def _speed(records: Mapping[Cell, Record]) -> Figure:
    """Speed divided by FSDP2's: a row per precision, a column per network and number of ranks."""
    places = sorted({(cell.network != "loopback", cell.ranks, cell.network) for cell in records})
    precisions = sorted({cell.precision for cell in records}, reverse=True)  # fp32, bf16
    models = list(dict.fromkeys(cell.model for cell in records))
    figure, axes = plt.subplots(
        len(precisions),
        len(places),
        figsize=(1.5 + 2.2 * len(places), 0.9 + (0.5 + 0.65 * len(models)) * len(precisions)),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for row, precision in zip(axes, precisions, strict=True):
        for each, (_, ranks, network) in zip(row, places, strict=True):
            found = {model: records.get(Cell(model, ranks, network, precision)) for model in models}
            _speed_bars(each, found)
            each.set_title(f"{network}, {ranks} ranks, {precision}", fontsize=9)
    for each in axes[-1]:
        each.set_xlabel("speed / FSDP2")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def _speed_bars(axes: Axes, found: Mapping[str, Record | None]) -> None:
    models, height = list(found), 0.8 / len(LABELS)
    for index, name in enumerate(LABELS):
        for place, (model, record) in enumerate(found.items()):
            ratio = (
                ratios(record.step_s("fsdp2"), record.step_s(name)) if record is not None else None
            )
            low, middle, high = ratio or (0.0, 0.0, 0.0)
            y = place + (index - (len(LABELS) - 1) / 2) * height
            if middle > WIDEST:
                axes.text(WIDEST, y, f"{middle:.1f} ", ha="right", va="center", fontsize=6)
            spread = {"xerr": [[middle - low], [high - middle]], "error_kw": {"lw": 0.8}}
            _bar(axes, y, middle, height, name, is_first=model == models[0], **spread)
    axes.axvline(1, color="#4d4d4d", lw=0.8)
    axes.set_xlim(0, WIDEST)
    axes.set_yticks(range(len(models)), models)
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


COSTS: dict[str, Callable[[Summary], float | None]] = {
    "MB sent": lambda each: each.sent_bytes,
    "MB copied": lambda each: each.copied_bytes,
    "peak of tensors, MB": lambda each: each.tensor_bytes,
    "host, ms": lambda each: None if each.host_s is None else 1e9 * each.host_s,
}


def _costs(records: Mapping[Cell, Record]) -> Figure:
    """Costs of a step on a rank, over loopback with the fewest ranks, in fp32 if measured."""
    least = min(cell.ranks for cell in records)
    precision = max(cell.precision for cell in records)
    cells = [cell for cell in records if (cell.ranks, cell.precision) == (least, precision)]
    cells = [cell for cell in cells if cell.rate is None] or cells
    figure, axes = plt.subplots(
        1, len(COSTS), figsize=(2.4 * len(COSTS), 1.1 + 0.65 * len(cells)), sharey=True
    )
    height = 0.8 / len(LABELS)
    for column, (title, cost) in zip(axes, COSTS.items(), strict=True):
        for place, cell in enumerate(cells):
            found = {each.engine: each for each in summarize(records, cell)}
            for index, name in enumerate(LABELS):
                value = cost(found[name]) if name in found else None
                y = place + (index - (len(LABELS) - 1) / 2) * height
                _bar(column, y, (value or 0) / 1e6, height, name, is_first=place == 0)
        column.set_title(title, fontsize=9)
        column.grid(visible=False, axis="y")
    axes[0].set_yticks(range(len(cells)), [cell.model for cell in cells])
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    figure.supxlabel(f"a step and rank, {least} ranks, {precision}", fontsize=8)
    return figure


def _padding(plans: Mapping[str, dict[str, Any]]) -> Figure:
    """Percent of padding over the number of ranks, as in Figure 11 of the paper."""
    figure, axes = plt.subplots(1, len(PADDED), figsize=(3 * len(PADDED), 3), sharey=True)
    for column, group in zip(axes, PADDED, strict=True):
        entries = [each for each in plans.values() if each["group"] == group]
        for rows, style in ROW_STYLES.items():
            own = [each for each in entries if each["rows"] == rows]
            label = f"{PEER_LABELS['ours']}, {rows or 'no'} row{'s' * (rows != 1)}"
            _line(column, own, "ours", style, label)
        for peer in ("fsdp2", "megatron"):
            own = [each for each in entries if each["rows"] is None]
            _line(column, own, peer, "-", PEER_LABELS[peer])
        column.set(xscale="log", xlabel="ranks")
        column.set_yscale("symlog", linthresh=0.1)
        ranks = sorted({each["ranks"] for each in entries})
        column.set_xticks(ranks, [str(each) for each in ranks])
        column.minorticks_off()
        column.set_title(group, fontsize=9)
    axes[0].set_ylabel("padding, % of the elements")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _line(axes: Axes, entries: list[dict[str, Any]], who: str, style: str, label: str) -> None:
    axes.plot(
        [each["ranks"] for each in entries],
        [each[who] for each in entries],
        style,
        marker="o",
        ms=3,
        lw=1.4,
        color=PEERS[who],
        label=label,
    )
