"""A plan as text: tables that fit 80 columns."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vescale_fsdp.cli.amounts import (
    binary,
    bits_per_s,
    count,
    difference,
    duration,
    percent,
    plain,
    several,
)
from vescale_fsdp.cli.codes import Code
from vescale_fsdp.cli.dtypes import Dtype
from vescale_fsdp.cli.estimate import Figures
from vescale_fsdp.cli.layouts import ALIGNMENT_BYTES, PlannedGroup
from vescale_fsdp.cli.model import kinds
from vescale_fsdp.cli.result import FSDP2, OURS, Report
from vescale_fsdp.cli.suggest import Suggestion
from vescale_fsdp.cli.timeline import KINDS

_MOST_LINES = 4  # of one kind, about different groups

# A row of the table of figures: label, value, and how it is written.
_Row = tuple[str, Callable[[Figures], float], Callable[[float], str]]


def print_report(report: Report, console: Console) -> None:
    """Print a header, the groups, the figures per rank, and what would be better."""
    _print_header(report, console)
    console.print()
    console.print(_groups_table(report.planned))
    _print_padded(report.planned, console)
    _print_tiles(report, console)
    console.print()
    console.print(_figures_table(report))
    when = report.figures[OURS].peak.when
    _line(console, f"Peak: during {when}; activations come on top.", "dim")
    unlike = ", which do not keep the blocks of --granularity" if report.rules else ""
    _line(console, f"The other columns are their layouts in our engine{unlike}.", "dim")
    _print_scalars(report, console)
    console.print()
    _print_suggestion(report, console)


def facts(report: Report) -> list[tuple[str, str]]:
    """The figures of our layouts as labels and values, for a page."""
    figures, settings = report.figures[OURS], report.settings
    return [
        ("parameters", f"{report.model.num_parameters:,}"),
        ("ranks", _ranks(report)),
        ("granularity", ", ".join(report.rules) or "any"),
        ("padding", percent(figures.padding_ratio)),
        ("weights per rank", binary(figures.weights_bytes)),
        ("gradients per rank", binary(figures.gradients_bytes)),
        (f"{settings.optimizer} states per rank", binary(figures.optimizer_bytes)),
        ("peak per rank in a step, without activations", binary(figures.peak_bytes)),
        ("sent per rank in a step", binary(figures.traffic.total_bytes)),
        (_wire(report), duration(figures.communication_s)),
    ]


def _line(console: Console, text: str, style: str | None = None) -> None:
    console.print(plain(text), style=style, highlight=False, markup=False)


def _ranks(report: Report) -> str:
    settings = report.settings
    if settings.num_replicas == 1:
        return f"{settings.num_ranks:,}"
    replicas = several(settings.num_replicas, "replica")
    return f"{settings.num_ranks:,} = {replicas} x {settings.num_shards:,}"


def _wire(report: Report) -> str:
    return f"time at {bits_per_s(report.settings.bandwidth_bytes_per_s)}"


def _print_header(report: Report, console: Console) -> None:
    settings, model = report.settings, report.model
    _line(
        console,
        f"{model.name}: {count(model.num_parameters)} "
        f"{'parameter' if model.num_parameters == 1 else 'parameters'} in "
        f"{several(model.num_units, 'unit')}, ranks: {_ranks(report)}",
        "bold",
    )
    shard_dtypes = ", ".join(sorted({each.group.dtype.name for each in report.planned}))
    codes = settings.codes
    _line(
        console,
        f"shards {shard_dtypes}, gathered {_travels(codes.gather, settings.compute_dtype)}, "
        f"reduced {_travels(codes.reduce, settings.reduce_dtype)} by {settings.backend}; "
        f"{settings.optimizer}",
        "dim",
    )
    _line(console, f"granularity: {', '.join(report.rules) or 'any'}", "dim")


def _travels(code: Code | None, dtype: Dtype) -> str:
    return dtype.name if code is None else f"{code} or {dtype.name}"


def _table(*columns: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _groups_table(planned: Sequence[PlannedGroup]) -> Table:
    table = _table("group", "units", "tensors", "elements", "per rank", "padding", "order")
    for each in planned:
        layout = each.layout
        table.add_row(
            escape(plain(each.title)),
            f"{each.unit.count:,}",
            f"{len(layout.specs):,}",
            count(each.group.numel),
            count(layout.shard_size),
            percent(layout.padding_ratio),
            layout.order_name,
        )
    return table


def _print_padded(planned: Sequence[PlannedGroup], console: Console) -> None:
    """Why groups are padded by more than 5%."""
    forced = [each for each in planned if each.is_forced]
    for each in forced[:_MOST_LINES]:
        assert each.advice is not None, "there is advice where blocks force padding"
        blocks = {spec.name: spec.block for spec in each.layout.specs}
        names = ", ".join(_counted_kinds(each.advice.forced_by))
        sizes = sorted({blocks[name] for name in each.advice.forced_by})
        in_blocks = ", ".join(f"{size:,}" for size in sizes)
        _line(
            console,
            f"{each.title}: padding is forced by {names}, in blocks of {in_blocks} elements",
        )
    _and_more(forced, "padded by blocks", console)
    others = [each for each in planned if each.is_padded_otherwise]
    for each in others[:_MOST_LINES]:
        _line(
            console,
            f"{each.title}: no block is to blame for its padding. Tensors and shards start at "
            f"multiples of {ALIGNMENT_BYTES} bytes in the narrowest dtype that travels "
            f"({each.layout.alignment} elements), which is much for so few elements per rank",
        )
    _and_more(others, "padded by the alignment", console)


def _print_tiles(report: Report, console: Console) -> None:
    """A way out, where tiles of codes may be what pads."""
    codes = report.settings.codes
    tiles = [
        each for each in (codes.gather, codes.reduce) if each and isinstance(each.block, tuple)
    ]
    if tiles and any(each.is_forced for each in report.planned):
        _line(
            console,
            f"Tiles of {tiles[0]} keep strips of rows in full width together; consecutive elements "
            f"({tiles[0].dtype}:256) let cuts go almost anywhere.",
        )


def _and_more(groups: Sequence[object], what: str, console: Console) -> None:
    if len(groups) > _MOST_LINES:
        _line(console, f"... and {several(len(groups) - _MOST_LINES, 'more group')} {what}")


def _print_scalars(report: Report, console: Console) -> None:
    scalars = [spec.name for each in report.planned for spec in each.layout.specs if not spec.shape]
    if scalars:
        more = f" and {len(scalars) - 1:,} more" if len(scalars) > 1 else ""
        _line(
            console,
            f"{FSDP2} refuses scalars ({scalars[0]}{more}); its column has one element per rank.",
            "dim",
        )


def _counted_kinds(names: Sequence[str]) -> list[str]:
    """Names that differ in their numbers only as one: ``experts.*.up (256)``."""
    return [f"{kind} ({n})" if n > 1 else kind for kind, n in Counter(kinds(names)).items()]


def _figures_table(report: Report) -> Table:
    table = _table("per rank", *report.figures)
    all_figures = list(report.figures.values())
    for label, value, form in _rows(report):
        ours, *others = (value(figures) for figures in all_figures)
        if label.startswith(" ") and not any((ours, *others)):
            continue
        shares = [difference(other, ours) if form is not percent else "" for other in others]
        beside = [
            f"{form(other):>9} {share:>8}" for other, share in zip(others, shares, strict=True)
        ]
        table.add_row(label, form(ours), *beside)
    return table


def _rows(report: Report) -> list[_Row]:
    peak: list[_Row] = [
        (f"  {kind}", lambda f, kind=kind: f.peak.parts.get(kind, 0), binary)  # type: ignore[misc]
        for kind in KINDS
    ]
    return [
        ("padding", lambda f: f.padding_ratio, percent),
        ("weights", lambda f: f.weights_bytes, binary),
        ("gradients", lambda f: f.gradients_bytes, binary),
        ("optimizer states", lambda f: f.optimizer_bytes, binary),
        ("peak in a step", lambda f: f.peak_bytes, binary),
        ("  weights and states", lambda f: f.resting_bytes, binary),
        *peak,
        ("sent in a step", lambda f: f.traffic.total_bytes, binary),
        ("  gathers in forward", lambda f: f.traffic.gather_forward_bytes, binary),
        ("  gathers in backward", lambda f: f.traffic.gather_backward_bytes, binary),
        ("  reductions", lambda f: f.traffic.reduce_bytes, binary),
        ("  between replicas", lambda f: f.traffic.replicate_bytes, binary),
        (_wire(report), lambda f: f.communication_s, duration),
    ]


def _print_suggestion(report: Report, console: Console) -> None:
    suggestion = report.suggestion
    if suggestion is None:
        _line(console, "No blocks force more than 5% padding: nothing to suggest.", "bold")
        return
    for name, sentence in suggestion.causes[:_MOST_LINES]:
        _line(console, f"Suggestion for {name}: {sentence}", "bold")
    _and_more(suggestion.causes, "padded by blocks", console)
    _line(console, "For the whole model, add these options to yours and run again:")
    ours = report.figures[OURS]
    rows = [("as above", ours)]
    for number, each in enumerate(suggestion.alternatives, start=1):
        pairs = zip(each.options[::2], each.options[1::2], strict=True)
        text = " \\\n    ".join(shlex.join(pair) for pair in pairs)
        # As it is: a line broken at a blank could not be pasted.
        console.print(f"({number}) {text}", highlight=False, markup=False, soft_wrap=True)
        rows.append((f"with ({number})", each.figures))
    _print_cautions(suggestion, ours, console)
    table = _table("the model", "padding", "weights", "states", "peak", "sent", "time")
    for label, figures in rows:
        table.add_row(
            label,
            percent(figures.padding_ratio),
            binary(figures.weights_bytes),
            binary(figures.optimizer_bytes),
            binary(figures.peak_bytes),
            binary(figures.traffic.total_bytes),
            duration(figures.communication_s),
        )
    console.print(table)


def _print_cautions(suggestion: Suggestion, ours: Figures, console: Console) -> None:
    """What a user should know before following a suggestion."""
    for number, each in enumerate(suggestion.alternatives, start=1):
        if each.is_below_row:
            _line(console, f"({number}): some of these blocks are smaller than a row.")
        if not each.is_enough:
            _line(console, f"({number}): blocks still force more than 5% on some groups.")
        if each.figures.resting_bytes > 2 * ours.resting_bytes:
            times = each.figures.resting_bytes / ours.resting_bytes
            _line(
                console,
                f"({number}): less padding, but {times:.1f} times the weights and states on each "
                "rank, as fewer ranks share them. Take it only if they have room.",
            )
