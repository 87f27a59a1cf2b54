"""``python3 dev.py elastic``: the demo. With ``--faults 200``: random faults, and the page.

    --named         each fault once, and the page
    --only WORD     named faults with this word in their names; no page is written
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import namespaces

from .faults import FAULTS
from .hosts import own_mounts
from .runner import run_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 dev.py elastic")
    parser.add_argument("--only")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with_network = namespaces.why_not() is None
    if with_network:
        own_mounts()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="elastic-"))
    folder.mkdir(exist_ok=True)
    chosen = [each for each in FAULTS if not args.only or args.only in each.name]
    report = run_all(chosen, args.steps, folder, 0, with_network=with_network)
    for outcome in report.outcomes:
        print(outcome.name, outcome.text())
    return 1 if report.wrong or any(each.fault for each in report.outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
