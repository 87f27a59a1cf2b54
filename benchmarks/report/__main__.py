"""Writes RESULTS.md, its pictures and the README's table from ``benchmarks/results``.

    python -m benchmarks.report

It needs matplotlib. Parts without results are skipped. Cases in which others are faster are shown
as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.compare import record
from benchmarks.optimizers.results import ROOT, read
from benchmarks.padding import FILE
from benchmarks.report import headline, plots
from benchmarks.report.tables import page


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description="RESULTS.md and its pictures."
    )
    parser.add_argument("--results", type=Path, default=record.FOLDER)
    parser.add_argument("--padding", type=Path, default=FILE)
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "RESULTS.md")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    records, padding = record.load_all(args.results), read(args.padding)
    drawn = plots.draw(records, padding, args.images)
    args.page.write_text(page(records, padding, drawn, args.page.parent))
    headline.write(records, args.readme)
    for path in [args.page, args.readme, *drawn]:
        print(f"{path.name}: written")


if __name__ == "__main__":
    main()
