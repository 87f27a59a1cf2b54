"""Run many cases, and print those that fail as programs, made as small as they get."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from .cases import Case
from .minimise import minimised
from .programs import program_of
from .runner import REFUSED, Failure, Invalid, check, drawn

SMALLER_TIMEOUT_S = 7  # while a case is made smaller
EVERY = 50  # cases a line of progress


def main(arguments: list[str]) -> int:
    """The exit code: 1 if a case failed."""
    options = _options(arguments)
    first = options.seed if options.only is None else options.only
    num_cases = options.cases if options.only is None else 1
    start = time.monotonic()
    counts: Counter[str] = Counter()
    for seed in range(first, first + num_cases):
        case = drawn(seed, options.ranks)
        began = time.monotonic()
        failure = check(program_of(case), options.timeout, options.device)
        if failure is None or failure.kind == REFUSED:
            counts["passed" if failure is None else REFUSED] += 1
        else:
            counts[f"failed: {failure.kind}"] += 1
        if options.only is not None or not (failure is None or failure.kind == REFUSED):
            _report(seed, case, failure, time.monotonic() - began, options)
        if (seed - first + 1) % EVERY == 0:
            minutes = (time.monotonic() - start) / 60
            print(f"{seed - first + 1} cases, {minutes:.1f} minutes: {dict(counts)}", flush=True)
    num_failed = sum(n for what, n in counts.items() if what.startswith("failed"))
    minutes = (time.monotonic() - start) / 60
    print(f"{counts['passed']} passed, {num_failed} failed, {minutes:.1f} minutes: {dict(counts)}")
    return 1 if num_failed else 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; then one more each")
    parser.add_argument("--ranks", type=int, choices=(2, 3, 4), help="default: drawn, mostly 2")
    parser.add_argument("--only", type=int, metavar="CASE", help="the seed of one case")
    parser.add_argument("--minimise", type=float, default=90, metavar="SECONDS", help="0: not")
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="of a case")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="of the ranks; cuda: over NCCL"
    )
    parser.add_argument("--out", type=Path, help="a folder for the programs that fail")
    return parser.parse_args(arguments)


def _report(
    seed: int, case: Case, failure: Failure | None, seconds: float, options: argparse.Namespace
) -> None:
    print(f"=== case {seed}, {seconds:.1f} s: {failure or 'passed'}", flush=True)
    if failure is None:
        print(program_of(case))
        return

    def fails(smaller: Case) -> bool:
        try:
            found = check(program_of(smaller), SMALLER_TIMEOUT_S, options.device)
        except Invalid:
            return False
        return found is not None and found.kind == failure.kind

    if options.minimise:
        case = minimised(case, fails, options.minimise)
    print(f"--- case {seed} as a program:\n{program_of(case)}", flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"case_{seed}.py").write_text(program_of(case))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
