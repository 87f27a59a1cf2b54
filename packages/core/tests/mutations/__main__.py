"""``python -m packages.core.tests.mutations [NAME ...]``: each has to be found by its tests.

The exit code is 1 if one is not.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from .runner import Mutation, StaleError, Verdict, all_mutations, verdict_of

_AT_A_TIME = 2  # ranks wait for each other half of the time


def _row(mutation: Mutation, found: Verdict | StaleError) -> str:
    if isinstance(found, StaleError):
        return f"STALE             {found}"
    word = "SURVIVES" if found.survived else "found"
    row = f"{word:9}{found.num_seconds:6.0f} s  {mutation.name}: {mutation.behaviour}"
    row += f"\n{'':19}{found.reason}"
    for test in found.survived:
        row += f"\n{'':19}not found by {test}"
    return row


def _verdict(mutation: Mutation) -> tuple[Mutation, Verdict | StaleError]:
    try:
        return mutation, verdict_of(mutation)
    except StaleError as error:
        return mutation, error


def main() -> int:
    """Run all mutations, or those that are named. The result is the exit code."""
    known = {each.name: each for each in all_mutations()}
    unknown = [name for name in sys.argv[1:] if name not in known]
    if unknown:
        print(f"there is no mutation {', '.join(unknown)}; there are:", *known, sep="\n  ")
        return 2
    chosen = [known[name] for name in sys.argv[1:]] or [*known.values()]
    begun, bad = time.monotonic(), 0
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for mutation, found in pool.map(_verdict, chosen):
            print(_row(mutation, found), flush=True)
            if isinstance(found, StaleError) or found.survived:
                bad += 1
                if len(chosen) == 1 and isinstance(found, Verdict):
                    print(found.output)
    print(f"{len(chosen) - bad} of {len(chosen)} found, in {time.monotonic() - begun:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
