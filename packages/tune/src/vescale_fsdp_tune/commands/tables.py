"""A plan as text: tables that fit 80 columns."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from vescale_fsdp.cli.text import binary, count, line, several, table
from vescale_fsdp_tune.commands.report import FSDP2, OURS, Report, Suggestion, memory_checkpoints
from vescale_fsdp_tune.commands.text import bits_per_s, difference, duration, percent
from vescale_fsdp_tune.costs.account import KINDS
from vescale_fsdp_tune.costs.estimate import Figures
from vescale_fsdp_tune.costs.layouts import ALIGNMENT_BYTES, PlannedGroup
from vescale_fsdp_tune.costs.model import Dtype, kinds
from vescale_fsdp_tune.costs.settings import Code

_MOST_LINES = 4  # limit for lines of one kind

# A row of the table of figures: label, function for the value, function for its text.
_Row = tuple[str, Callable[[Figures], float], Callable[[float], str]]


def print_report(report: Report, console: Console) -> None:
    """Print a header, the groups, the figures per rank, and suggestions."""
    _print_header(report, console)
    console.print()
    columns = ("group", "units", "tensors", "elements", "per rank", "padding", "order")
    console.print(table(columns, [_group_row(each) for each in report.planned]))
    _print_padded(report.planned, console)
    _print_tiles(report, console)
    console.print()
    console.print(table(("per rank", *report.figures), list(_figure_rows(report))))
    _print_peak(report, console)
    unlike = ", which do not keep the blocks of --granularity" if report.rules else ""
    line(console, f"The other columns are their layouts in our engine{unlike}.", "dim")
    _print_scalars(report, console)
    _print_memory_checkpoints(report, console)
    console.print()
    _print_suggestion(report, console)


def _print_memory_checkpoints(report: Report, console: Console) -> None:
    found = memory_checkpoints(report)
    if found is not None:
        part, replicas = binary(found["part_bytes"]), found["replicas"]
        line(
            console,
            f"Elastic training with replicas={replicas} keeps 2 x (1 + {replicas}) x {part} = "
            f"{binary(found['host_bytes'])} of host memory for each rank, and {part} more while a "
            "memory checkpoint is made.",
            "bold",
        )


def _print_peak(report: Report, console: Console) -> None:
    """Print when the peak is, and what it would be if activations were not kept."""
    when, trace = report.figures[OURS].peak.when, report.model.trace
    if trace is None:
        line(console, f"Peak: during {when}; activations are not included.", "dim")
        return
    most = f"activations alone are up to {binary(trace.highest_bytes)}"
    if trace.host_bytes:
        most += f", and {binary(trace.host_bytes)} in host memory"
    line(console, f"Peak: during {when}; {most}.", "dim")
    for name, figures in report.other_activations.items():
        peak = binary(figures.peak_bytes)
        line(console, f"With --activations {name} the peak would be {peak}.", "bold")


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
    line(
        console,
        f"{model.name}: {count(model.num_parameters)} "
        f"{'parameter' if model.num_parameters == 1 else 'parameters'} in "
        f"{several(model.num_units, 'unit')}, ranks: {_ranks(report)}",
        "bold",
    )
    shard_dtypes = ", ".join(sorted({each.group.dtype.name for each in report.planned}))
    codes = settings.codes
    line(
        console,
        f"shards {shard_dtypes}, gathered {_travels(codes.gather, settings.compute_dtype)}, "
        f"reduced {_travels(codes.reduce, settings.reduce_dtype)} by {settings.backend}; "
        f"{settings.optimizer}",
        "dim",
    )
    line(console, f"granularity: {', '.join(report.rules) or 'any'}", "dim")


def _travels(code: Code | None, dtype: Dtype) -> str:
    return dtype.name if code is None else f"{code} or {dtype.name}"


def _group_row(each: PlannedGroup) -> Sequence[str]:
    return (
        each.title,
        f"{each.unit.count:,}",
        f"{len(each.layout.specs):,}",
        count(each.group.numel),
        count(each.layout.shard_size),
        percent(each.layout.padding_ratio),
        each.layout.order_name,
    )


def _print_padded(planned: Sequence[PlannedGroup], console: Console) -> None:
    """Print why groups have more than 5% padding."""
    forced = [each for each in planned if each.is_forced]
    for each in forced[:_MOST_LINES]:
        assert each.advice is not None, "there is advice where blocks force padding"
        blocks = {spec.name: spec.block for spec in each.layout.specs}
        names = ", ".join(_counted_kinds(each.advice.forced_by))
        sizes = sorted({blocks[name] for name in each.advice.forced_by})
        in_blocks = ", ".join(f"{size:,}" for size in sizes)
        line(
            console,
            f"{each.title}: padding is forced by {names}, in blocks of {in_blocks} elements",
        )
    _and_more(forced, "padded by blocks", console)
    others = [each for each in planned if each.is_padded_otherwise]
    for each in others[:_MOST_LINES]:
        line(
            console,
            f"{each.title}: its padding does not come from blocks. Tensors and shards start at "
            f"multiples of {ALIGNMENT_BYTES} bytes in the narrowest dtype that is sent "
            f"({each.layout.alignment} elements), which is much for so few elements per rank",
        )
    _and_more(others, "padded by the alignment", console)


def _print_tiles(report: Report, console: Console) -> None:
    """Print a suggestion if tiles of codes may cause the padding."""
    codes = report.settings.codes
    tiles = [
        each for each in (codes.gather, codes.reduce) if each and isinstance(each.block, tuple)
    ]
    if tiles and any(each.is_forced for each in report.planned):
        line(
            console,
            f"Tiles of {tiles[0]} keep strips of rows in full width together; consecutive elements "
            f"({tiles[0].dtype}:256) can be split almost anywhere.",
        )


def _and_more(groups: Sequence[object], what: str, console: Console) -> None:
    if len(groups) > _MOST_LINES:
        line(console, f"... and {several(len(groups) - _MOST_LINES, 'more group')} {what}")


def _print_scalars(report: Report, console: Console) -> None:
    scalars = [spec.name for each in report.planned for spec in each.layout.specs if not spec.shape]
    if scalars:
        more = f" and {len(scalars) - 1:,} more" if len(scalars) > 1 else ""
        line(
            console,
            f"{FSDP2} refuses scalars ({scalars[0]}{more}); its column has one element per rank.",
            "dim",
        )


def _counted_kinds(names: Sequence[str]) -> list[str]:
    """Join names that differ only in their numbers: ``experts.*.up (256)``."""
    return [f"{kind} ({n})" if n > 1 else kind for kind, n in Counter(kinds(names)).items()]


def _figure_rows(report: Report) -> Iterator[Sequence[str]]:
    for label, value, form in _rows(report):
        ours, *others = (value(figures) for figures in report.figures.values())
        if label.startswith(" ") and not any((ours, *others)):
            continue
        shares = [difference(other, ours) if form is not percent else "" for other in others]
        beside = zip(others, shares, strict=True)
        yield label, form(ours), *(f"{form(other):>9} {share:>8}" for other, share in beside)


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
        line(console, "No blocks force more than 5% padding: nothing to suggest.", "bold")
        return
    for name, sentence in suggestion.causes[:_MOST_LINES]:
        line(console, f"Suggestion for {name}: {sentence}", "bold")
    _and_more(suggestion.causes, "padded by blocks", console)
    line(console, "For the whole model, add these options to yours and run again:")
    ours = report.figures[OURS]
    rows = [("as above", ours)]
    for number, each in enumerate(suggestion.alternatives, start=1):
        pairs = zip(each.options[::2], each.options[1::2], strict=True)
        text = " \\\n    ".join(shlex.join(pair) for pair in pairs)
        # Not wrapped, so that users can copy it.
        console.print(f"({number}) {text}", highlight=False, markup=False, soft_wrap=True)
        rows.append((f"with ({number})", each.figures))
    _print_cautions(suggestion, ours, console)
    columns = ("the model", "padding", "weights", "states", "peak", "sent", "time")
    console.print(table(columns, [(label, *_summary(figures)) for label, figures in rows]))


def _summary(figures: Figures) -> Sequence[str]:
    return (
        percent(figures.padding_ratio),
        binary(figures.weights_bytes),
        binary(figures.optimizer_bytes),
        binary(figures.peak_bytes),
        binary(figures.traffic.total_bytes),
        duration(figures.communication_s),
    )


def _print_cautions(suggestion: Suggestion, ours: Figures, console: Console) -> None:
    """Print the drawbacks of the suggestions."""
    for number, each in enumerate(suggestion.alternatives, start=1):
        if each.is_below_row:
            line(console, f"({number}): some of these blocks are smaller than a row.")
        if not each.is_enough:
            line(console, f"({number}): blocks still force more than 5% on some groups.")
        if each.figures.resting_bytes > 2 * ours.resting_bytes:
            times = each.figures.resting_bytes / ours.resting_bytes
            line(
                console,
                f"({number}): less padding, but {times:.1f} times the weights and states on each "
                "rank, as fewer ranks share them. Use it only if that fits in memory.",
            )
