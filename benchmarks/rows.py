"""Compares the rows of the table of ZeRO's stages with DDP and DeepSpeed: speed and memory.

    python -m benchmarks.rows                    # all cells: 25 minutes on two cores
    python -m benchmarks.rows --models gpt-7m norms-1500 --ranks 2 --networks loopback

It measures as `benchmarks.compare` does: the same model, data, optimizer and steps for all engines,
separate processes for each, in turns within one run. Speeds are divided by DDP's within a round.
Each cell is stored when it is done, and measured again only if the core's code or the settings
have changed.

Memory is the peak of tensors on a rank in a step, counted over loopback. It is compared with what a
row holds by the table (`Row`), and with the activations: these are DDP's peak without the four
copies of the model that DDP holds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from subprocess import SubprocessError
from typing import NamedTuple

from benchmarks.compare import grid
from benchmarks.compare.grid import Cell
from benchmarks.compare.measure import Settings, measure
from benchmarks.compare.record import FOLDER as OF_COMPARE
from benchmarks.compare.record import Record, is_done, keep, load_all
from benchmarks.compare.spread import quartiles, ratios
from benchmarks.compare.table import spread_text
from benchmarks.compare.targets import Verdict
from benchmarks.engines import missing
from benchmarks.models import PRESETS
from benchmarks.slow_network import why_not

__all__ = ["FOLDER", "memory_lines", "speed_lines", "verdicts"]

FOLDER = OF_COMPARE.parent / "rows"
SMALL = "norms-1500"
ITEM_BYTES = 4  # everything here is in fp32


class Row(NamedTuple):
    """What a rank holds of a model at the end of a backward, by ZeRO's stages.

    Each entry is whether it is sharded: one copy divided by the number of ranks, or a whole one.
    AdamW's states are two copies. Source: ZeRO, arXiv 1910.02054, Figure 1, in fp32.
    """

    label: str
    parameters: bool
    gradients: bool
    states: bool

    def copies(self, ranks: int) -> Fraction:
        """Return how many copies of the model that are."""
        part = Fraction(1, ranks)
        each = zip((1, 1, 2), (self.parameters, self.gradients, self.states), strict=True)
        return sum((number * (part if sharded else 1) for number, sharded in each), Fraction(0))


ROWS = {
    "ddp": Row("DDP", False, False, False),
    "vescale-ddp": Row("ours, ddp", False, False, False),
    "vescale-zero1": Row("ours, zero1", False, False, True),
    "vescale-zero2": Row("ours, zero2", False, True, True),
    "vescale": Row("ours, zero3", True, True, True),
    "deepspeed-1": Row("DeepSpeed, 1", False, False, True),
    "deepspeed-2": Row("DeepSpeed, 2", False, True, True),
}
# Of DDP's speed, by row; of models with many small parameters for the last.
OVER_DDP = {"vescale-ddp": 1.0, "vescale-zero1": 1.0, "vescale-zero2": 0.97}
SMALL_ZERO3 = 1 / 1.5
OVER_ROW = 1.05  # of the table's memory and activations


def speed_lines(folder: Path = FOLDER) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of speeds."""
    others = [name for name in ROWS if name != "ddp"]
    head = ["model", "ranks", "network", "DDP, ms", *(ROWS[name].label for name in others)]
    rows = []
    for cell, record in load_all(folder).items():
        if not record.step_s("ddp"):
            continue
        speeds = [spread_text(ratios(record.step_s("ddp"), record.step_s(n))) for n in others]
        time = f"{1000 * quartiles(record.step_s('ddp'))[1]:.0f}"
        rows.append([cell.model, str(cell.ranks), cell.network, time, *speeds])
    return head, rows


def memory_lines(folder: Path = FOLDER) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of memory."""
    head = ["model", "ranks", "activations"]
    head += [f"{row.label}: by the table, measured" for row in ROWS.values()]
    rows = []
    for cell, record in load_all(folder).items():
        found = {each.engine: each for each in _memory(record)}
        if found:
            texts = [
                f"{found[n].held / 1e6:.1f}, {found[n].measured / 1e6:.1f}" if n in found else ""
                for n in ROWS
            ]
            activations = f"{found['ddp'].activations / 1e6:.1f}"
            rows.append([cell.model, str(cell.ranks), activations, *texts])
    return head, rows


class _Memory(NamedTuple):
    """Bytes of a rank: of the model by the table, of activations, and beyond these measured."""

    engine: str
    held: float
    activations: float
    measured: float


def _memory(record: Record) -> Iterator[_Memory]:
    """Memory of each engine, if it was counted in this cell."""
    results = record.engines
    base = results["ddp"].tensor_bytes if "ddp" in results else None
    if base is None:
        return
    ranks = record.cell.ranks
    params = PRESETS[record.cell.model].make().parameters()
    model_bytes = sum(param.numel() * ITEM_BYTES for param in params)
    activations = base - float(ROWS["ddp"].copies(ranks) * model_bytes)
    for name, row in ROWS.items():
        peak = results[name].tensor_bytes if name in results else None
        if peak is not None:
            held = float(row.copies(ranks) * model_bytes)
            yield _Memory(name, held, activations, peak - activations)


def verdicts(records: Mapping[Cell, Record] | None = None) -> Iterator[Verdict]:
    """Speeds and memory compared with what is aimed at."""
    for cell, record in (load_all(FOLDER) if records is None else records).items():
        aims = OVER_DDP | ({"vescale": SMALL_ZERO3} if cell.model == SMALL else {})
        for name, least in aims.items():
            speed = ratios(record.step_s("ddp"), record.step_s(name))
            if speed is not None:
                target = f"{ROWS[name].label}: at least {least:.2f} of the speed of DDP"
                yield Verdict(target, str(cell), spread_text(speed), speed[1] >= least)
        for each in _memory(record):
            if each.engine in OVER_DDP:
                ratio = (each.measured + each.activations) / (each.held + each.activations)
                target = (
                    f"{ROWS[each.engine].label}: peak of tensors at most {OVER_ROW} of the "
                    "table's and activations"
                )
                yield Verdict(target, str(cell), f"{ratio:.3f}", ratio <= OVER_ROW)


def main() -> int:
    """Measure what is missing, and print everything."""
    args = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = grid.cells(args.models, args.ranks, args.networks, ["fp32"])
    if reason := why_not():
        print(f"no limited networks: {reason}", file=sys.stderr)
        chosen = [cell for cell in chosen if cell.rate is None]
    engines = []
    for name in args.engines:
        if reason := missing(name):
            print(f"{name} is left out: {reason}", file=sys.stderr)
        else:
            engines.append(name)
    settings = Settings(args.rounds, args.steps, args.seconds)
    failed = 0
    for cell in chosen:
        path = args.out / cell.file_name
        if args.fresh or not is_done(path, engines, settings):
            print(cell, file=sys.stderr, flush=True)
            try:
                found, link = measure(cell, engines, settings, lambda what: None)
            except (RuntimeError, OSError, SubprocessError) as error:
                print(f"{cell}: {error}", file=sys.stderr)
                failed += 1
                continue
            for name, result in found.items():
                if result.left_out is not None:
                    print(f"{cell}: {name} is left out: {result.left_out}", file=sys.stderr)
            keep(path, cell, settings, found, link)
    for head, rows in (speed_lines(args.out), memory_lines(args.out)):
        print(*("| " + " | ".join(row) + " |" for row in (head, *rows)), sep="\n")
    for verdict in verdicts(load_all(args.out)):
        print(verdict)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rows", description="Rows of ZeRO's table beside DDP."
    )
    parser.add_argument("--models", nargs="+", default=grid.MODELS, choices=PRESETS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--networks", nargs="+", default=["loopback", "1gbit"])
    parser.add_argument("--engines", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps of each engine per round")
    parser.add_argument("--seconds", type=float, default=35.0, help="limit of a cell's rounds")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
