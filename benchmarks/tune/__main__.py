"""Whether the settings that a budget chooses are the fastest ones that fit.

    python -m benchmarks.tune                    # 4 models, 2 networks: 35 minutes on two cores
    python -m benchmarks.tune --models gpt-7m --networks loopback

For each model and network ``fully_shard(budget=...)`` chooses for three budgets. Then all
candidates train in turns, each in processes of its own, and the peak of each is counted. It prints
the regret of each choice. A cell is stored when it is done, and measured again only if the core's
code or the settings have changed. Limited networks need Linux and root
(`benchmarks.slow_network`).
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import product
from pathlib import Path
from subprocess import SubprocessError

from benchmarks.compare import grid
from benchmarks.compare.record import source_digest
from benchmarks.models import PRESETS
from benchmarks.optimizers.results import circumstances, read, write
from benchmarks.slow_network import why_not
from benchmarks.tune.measure import measure
from benchmarks.tune.regret import FOLDER, lines, load_all, peak_lines, verdicts


def main() -> int:
    """Measure what is missing, and print everything."""
    args = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    if reason := why_not():
        print(f"no networks can be made here: {reason}", file=sys.stderr)
        return 2
    failed = 0
    for model, network in product(args.models, args.networks):
        path = args.out / f"{model}_{args.ranks}_{network}.json"
        settings = {"rounds": args.rounds, "seconds": args.seconds, "source": source_digest()}
        if not args.fresh and read(path).get("settings") == settings:
            continue

        def say(what: str, cell: str = path.stem) -> None:
            print(f"{cell}: {what}", file=sys.stderr, flush=True)

        rate = None if network == "loopback" else network
        try:
            found = measure(model, args.ranks, rate, args.rounds, args.seconds, say)
        except (RuntimeError, OSError, SubprocessError) as error:
            say(str(error))
            failed += 1
            continue
        place = {"model": model, "ranks": args.ranks, "network": network}
        write(path, {"circumstances": circumstances(), "settings": settings} | place | found)
    for head, rows in (lines(args.out), peak_lines(args.out)):
        print(*("| " + " | ".join(row) + " |" for row in (head, *rows)), sep="\n")
    for verdict in verdicts(load_all(args.out)):
        print(verdict)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description="Choices of budgets beside all candidates."
    )
    parser.add_argument("--models", nargs="+", default=grid.MODELS, choices=PRESETS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--networks", nargs="+", default=["loopback", "1gbit"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of a cell's rounds")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
