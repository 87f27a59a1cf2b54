"""Writes the tables of RESULTS.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compare.grid import LABELS, PAIRS, Cell
from benchmarks.compare.record import Record
from benchmarks.compare.spread import quartiles, ratios
from benchmarks.compare.summary import Summary, summarize
from benchmarks.compare.table import spread_text
from benchmarks.compare.targets import PEERS, busy_share, padding_verdicts, verdicts
from benchmarks.report.beyond import sections
from benchmarks.report.goals import goals
from benchmarks.report.headline import mega

__all__ = ["page"]

COPIED, TENSORS = "MB copied in a step, beyond the model's own copies", "Peak of tensors, MB"
METRICS: dict[str, tuple[str, Callable[[Summary], float | None]]] = {
    "MB that a rank sends in a step, at the network": (
        ".1f", lambda each: mega(each.sent_bytes)
    ),
    COPIED: (".1f", lambda each: mega(each.copied_bytes)),
    TENSORS: (".1f", lambda each: mega(each.tensor_bytes)),
    "Peak of resident memory on a rank, less that before the model was built, MB": (
        ".0f", lambda each: mega(each.resident_bytes)
    ),
    "CPU time of a process in a step beyond that of the model alone, ms": (
        ".0f", lambda each: None if each.host_s is None else 1000 * each.host_s
    ),
    "Losses compared with DDP's, the largest relative difference of a step": (
        ".1e", lambda each: each.loss_difference
    ),
}  # fmt: skip
PLACE = ["model", "ranks", "network", "precision"]
CAUSES = {
    "ddp": "DDP holds all parameters, gradients and optimizer states on every rank and needs no "
    "all-gathers. An all-reduce sends two thirds of what two all-gathers and a reduce-scatter send "
    "of the model, and DDP has no buffers to fill and release. If the memory suffices, use DDP. "
    "[A profile of both](../docs/design/performance.md#where-processor-time-goes).",
    "deepspeed": "All cores are busy in these cells, so that overlap gains nothing.",
}
PADDING_RANKS = (64, 256, 512, 1024)
# Approximate values of Figure 11, in percent: blocks of 1 and 16 rows, and of 128 rows.
PAPER_PADDING = {
    "DeepSeek-V3-671B, MoE layer": ("under 3", "mostly under 3"),
    "GPT-OSS-120B (HF), layer": ("under 3", "up to about 18"),
}


def page(
    records: Mapping[Cell, Record], padding: dict[str, Any], images: list[Path], folder: Path
) -> str:
    """Return the text of RESULTS.md, which is in ``folder``."""
    shown = {path.stem: Path(os.path.relpath(path, folder)).as_posix() for path in images}
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.report` from the files in `benchmarks/results`, not by",
        "hand. [README.md](README.md) explains each column and how it is measured.",
        "",
    ]
    if records:
        lines += [*_targets(records, padding), *_circumstances(records), *_speed(records, shown)]
        lines += [*_losses(records), *_metrics(records, shown)]
    if padding:
        lines += _padding(padding, shown)
    lines += sections(shown)
    return "\n".join(lines).rstrip() + "\n"


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _targets(records: Mapping[Cell, Record], padding: dict[str, Any]) -> Iterator[str]:
    judged = [*verdicts(records), *padding_verdicts(padding), *goals()]
    yield "## Targets"
    yield ""
    missed = [each for each in judged if not each.is_met]
    limits = [each for each in missed if each.limit]
    others = [each for each in missed if not each.limit]
    rows = []
    for target in dict.fromkeys(each.target for each in judged):
        counts = [sum(v.target == target for v in part) for part in (judged, missed, limits)]
        cases, num_missed, num_limits = counts
        numbers = cases, cases - num_missed, num_limits, num_missed - num_limits
        rows.append([target, *map(str, numbers)])
    yield from _table(["target", "cases", "met", "at a limit", "not met"], rows)
    if limits:
        yield "At a limit:"
        yield ""
        told = [[each.where, each.target, each.found, each.limit] for each in limits]
        yield from _table(["where", "target", "found", "limit"], told)
    if others:
        yield "Not met:"
        yield ""
        told = [[each.where, each.target, each.found] for each in others]
        yield from _table(["where", "target", "found"], told)


def _circumstances(records: Mapping[Cell, Record]) -> Iterator[str]:
    yield "## Machines and commands"
    yield ""
    kinds: dict[str, list[Cell]] = {}
    for cell, record in records.items():
        found = record.circumstances
        machine = found["machine"]
        versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
        modified = ", with changes" if found["is_modified"] else ""
        text = (
            f"{machine['cores']} cores of {machine['cpu']}, {machine['system']}; {versions}; "
            f"commit {found['commit']}{modified}; `{found['command']}`"
        )
        kinds.setdefault(text, []).append(cell)
    for text, cells in kinds.items():
        what = "all cells" if len(kinds) == 1 else f"{len(cells)} cells"
        yield f"- {what}: {text}"
    yield ""
    for cell, record in records.items():
        for name, result in record.engines.items():
            if result.left_out is not None:
                yield f"- left out: {LABELS.get(name, name)} in {cell}: {result.left_out}"
    yield ""


def _speed(records: Mapping[Cell, Record], shown: dict[str, str]) -> Iterator[str]:
    yield "## Speed"
    yield ""
    yield from _image(shown, "compare-speed", "Speed over FSDP2's in each cell")
    yield "Medians over the rounds, in milliseconds a step:"
    yield ""
    rows = []
    for cell, record in records.items():
        found = {each.engine: each for each in summarize(records, cell)}
        times = [f"{1000 * found[n].step_s[1]:.0f}" if n in found else "" for n in LABELS]
        ours = found.get("vescale")
        tokens = f"{ours.tokens_per_s:.0f}" if ours else ""
        least = {n: quartiles(record.step_s(n))[1] for n in ("compute", "wire") if n in found}
        bounds = [f"{1000 * least[n]:.0f}" if n in least else "" for n in ("compute", "wire")]
        rows.append([*_place(cell), *times, tokens, *bounds])
    bounds = ["compute alone", "wire alone"]
    yield from _table([*PLACE, *LABELS.values(), "our tokens/s", *bounds], rows)
    yield "Ratios of our speed to theirs within a round, with quartiles, also with both tuned:"
    yield ""
    heads = [f"{LABELS[ours]} / {LABELS[theirs]}" for ours, theirs in PAIRS]
    rows = [
        [*_place(cell), *(spread_text(_ratio(record, *pair)) for pair in PAIRS)]
        for cell, record in records.items()
    ]
    yield from _table([*PLACE, *heads], rows)


def _ratio(record: Record, ours: str, theirs: str) -> tuple[float, float, float] | None:
    return ratios(record.step_s(theirs), record.step_s(ours))


def _losses(records: Mapping[Cell, Record]) -> Iterator[str]:
    """The cells in which another engine is faster, and why."""
    yield "## Where others are faster"
    yield ""
    lost: dict[tuple[str, str], list[tuple[Cell, tuple[float, float, float]]]] = {}
    for pair in PAIRS:
        for cell, record in records.items():
            found = _ratio(record, *pair)
            if found is not None and found[1] < 1:
                lost.setdefault(pair, []).append((cell, found))
    if not lost:
        yield "Nowhere."
        yield ""
    for (ours, theirs), cells in lost.items():
        middles = [found[1] for _, found in cells]
        span = f"{min(middles):.2f} to {max(middles):.2f}"
        yield (
            f"{LABELS[ours]} has {span} of the speed of {LABELS[theirs]} in {len(cells)} of "
            f"{len(records)} cells. {CAUSES.get(theirs, '')}".rstrip()
        )
        yield ""
        rows = []
        for cell, found in cells:
            busy = [f"{busy_share(records[cell], each):.0%}" for each in (ours, theirs)]
            rows.append([*_place(cell), spread_text(found), *busy])
        head = ["our speed / its", "cores busy, ours", "its"]
        yield from _table([*PLACE, *head], rows)


def _metrics(records: Mapping[Cell, Record], shown: dict[str, str]) -> Iterator[str]:
    yield "## What a step costs"
    yield ""
    yield from _image(shown, "compare-costs", "Bytes, memory and host time of a step")
    yield "A figure is bold if it is less than 0.99 of that of veScale-FSDP with its defaults."
    yield ""
    for title, (form, value_of) in METRICS.items():
        rows = []
        for cell in records:
            if title in (COPIED, TENSORS) and cell.rate is not None:
                continue  # counted over loopback
            found = {each.engine: value_of(each) for each in summarize(records, cell)}
            ours = found.get("vescale")
            texts = []
            for name in LABELS:
                value = found.get(name)
                text = "" if value is None else f"{value:{form}}"
                is_less = value is not None and ours is not None and value < 0.99 * ours
                texts.append(f"**{text}**" if is_less else text)
            if any(texts):
                rows.append([*_place(cell), *texts])
        yield f"### {title}"
        yield ""
        yield from _table([*PLACE, *LABELS.values()], rows)


def _padding(padding: dict[str, Any], shown: dict[str, str]) -> Iterator[str]:
    plans = list(padding["plans"].values())
    yield "## Padding and planning time"
    yield ""
    yield from _image(shown, "padding", "Padding over the number of ranks")
    slowest = max(plans, key=lambda each: each["seconds"])
    yield (
        f"The slowest of {len(plans)} plans took {1000 * slowest['seconds']:.0f} ms "
        f"({slowest['group']}, {slowest['tensors']} tensors); the paper says under 300 ms."
    )
    yield ""
    for peer, label in PEERS.items():
        blocked = [each for each in plans if each["rows"]]
        worse = [each for each in blocked if each["ours"] > each[peer]]
        if worse:
            most = max(worse, key=lambda each: each["ours"] - each[peer])
            yield (
                f"- {label} does not keep blocks whole. With blocks our padding is above its "
                f"padding in {len(worse)} of {len(blocked)} plans. The largest difference is "
                f"{most['ours']:.2f} to {most[peer]:.2f}% "
                f"({most['group']}, {most['rows']} rows, {most['ranks']} ranks)."
            )
    yield ""
    ranks = ", ".join(map(str, PADDING_RANKS))
    yield f"Padding in percent of the elements, at {ranks} ranks:"
    yield ""
    rows = []
    for group in dict.fromkeys(each["group"] for each in plans):
        own = [each for each in plans if each["group"] == group]
        for size in dict.fromkeys(each["rows"] for each in own):
            there = [each for each in own if each["rows"] == size]
            at = {each["ranks"]: each for each in there}
            if size is None:
                peers = [_percents(at, "fsdp2"), _percents(at, "megatron"), ""]
            else:
                paper = PAPER_PADDING.get(group, ("", ""))
                peers = ["", "", paper[size == 128]]
            rows.append([group, str(size or "none"), _percents(at, "ours"), *peers])
    head = ["group", "rows in a block", "ours", "FSDP2", "Megatron-FSDP v2", "the paper"]
    yield from _table(head, rows)


def _percents(at: dict[int, dict[str, Any]], who: str) -> str:
    return ", ".join(f"{at[ranks][who]:.2f}" for ranks in PADDING_RANKS)


def _place(cell: Cell) -> list[str]:
    return [cell.model, str(cell.ranks), cell.network, cell.precision]


def _image(shown: dict[str, str], name: str, text: str) -> Iterator[str]:
    if name in shown:
        yield f"![{text}]({shown[name]})"
        yield ""
