"""Compares the same training with veScale-FSDP, FSDP2, DeepSpeed ZeRO-3 and DDP, cell by cell.

    python -m benchmarks.compare                    # the whole grid: 40 minutes on two cores
    python -m benchmarks.compare --quick            # a part of it, in 3 minutes
    python -m benchmarks.compare --models gpt-7m --ranks 2 --networks 1gbit --engines vescale fsdp2

All have the same model, data, seed, precision, optimizer (``torch.optim.AdamW``) and number of
steps. Each engine has separate processes, one per rank, all started before the measurement. Then
they alternate after one or a few steps: A B C A B C. So noise of the machine affects all of them,
and ratios are computed within one round. ``compute`` is the model without an engine, on the same
cores.

Each cell is written to its own file when it is done. Start the command again to continue, or to see
the results. A cell is measured again if the core's code or the settings have changed. The
exit code is 1 if a cell failed. Limited networks need Linux and root (`benchmarks.slow_network`).
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import SubprocessError

from benchmarks.compare import grid
from benchmarks.compare.grid import Cell
from benchmarks.compare.measure import LEAST_ROUNDS, Settings, measure
from benchmarks.compare.record import FOLDER, is_done, keep, load, load_all
from benchmarks.compare.summary import summarize
from benchmarks.compare.table import table_of
from benchmarks.compare.targets import verdicts
from benchmarks.engines import ENGINES, missing
from benchmarks.models import PRESETS
from benchmarks.slow_network import why_not
from benchmarks.zero import VARIANTS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

QUICK = {"models": ["gpt-7m", "moe-10m"], "ranks": [2], "precisions": ["fp32"], "rounds": 4}


def main() -> int:
    """Measure what is missing, print everything, and compare it with the targets."""
    args = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console(width=None if sys.stdout.isatty() else 170)
    chosen = grid.cells(args.models, args.ranks, args.networks, args.precisions)
    if (reason := why_not()) and any(cell.rate for cell in chosen):
        console.print(f"no limited networks, and no bytes counted: {reason}", style="yellow")
        chosen = [cell for cell in chosen if cell.rate is None]
    engines = []
    for name in args.engines:
        if reason := missing(name):
            console.print(f"{name} is left out: {reason}", style="yellow")
        else:
            engines.append(name)
    settings = Settings(args.rounds, args.steps, args.seconds, args.starts)
    failed = _measure_all(chosen, engines, settings, args.out, args.fresh, console)
    records = load_all(args.out)
    for verdict in verdicts({cell: records[cell] for cell in chosen if cell in records}):
        console.print(str(verdict), highlight=False, style="" if verdict.is_met else "bold")
    for cell in failed:
        console.print(f"failed  {cell}", style="red")
    return 1 if failed else 0


def _measure_all(
    cells: list[Cell],
    engines: list[str],
    settings: Settings,
    folder: Path,
    is_fresh: bool,
    console: Console,
) -> list[Cell]:
    """Measure cells. Returns those that failed."""
    failed = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("cells", total=len(cells), doing="")
        for cell in cells:
            path, chosen = folder / cell.file_name, grid.engines_of(cell, engines)
            if is_fresh or not is_done(path, chosen, settings):

                def say(what: str, cell: Cell = cell) -> None:
                    progress.update(task, doing=f"{cell}: {what}")

                try:
                    found, link = measure(cell, chosen, settings, say)
                except (RuntimeError, OSError, SubprocessError) as error:
                    progress.console.print(f"{cell}: {error}", style="red")
                    failed.append(cell)
                    progress.advance(task)
                    continue
                keep(path, cell, settings, found, link)
            record = load(path)
            known = {cell: record}
            loopback = replace(cell, network="loopback")
            if (folder / loopback.file_name).exists():
                known[loopback] = load(folder / loopback.file_name)
            summaries = summarize(known, cell)
            progress.console.print(table_of(cell, summaries, record.engines))
            progress.advance(task)
    return failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description="Compare engines."
    )
    names = [*ENGINES, *VARIANTS]
    parser.add_argument("--quick", action="store_true", help="a part of the grid, in 3 minutes")
    parser.add_argument(
        "--models", nargs="+", default=grid.MODELS, choices=PRESETS, metavar="MODEL"
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument(
        "--networks", nargs="+", default=["loopback", "1gbit"], help="loopback, 500mbit, ..."
    )
    parser.add_argument(
        "--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"]
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=grid.ENGINES,
        choices=names,
        metavar="ENGINE",
        help=", ".join(names),
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1, help="steps of each engine per round")
    parser.add_argument("--starts", type=int, default=1, help="starts, each with --rounds")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help=f"limit of a start after {LEAST_ROUNDS} rounds"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
